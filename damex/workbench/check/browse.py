"""The command ``damex data browse``: an overview page of a mixture."""

from __future__ import annotations

import base64
import io
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader
from PIL import Image, ImageDraw, ImageFont

from damex.datasets.coco_records import parse_records, used_boxes
from damex.datasets.coco_schema import Expectations
from damex.datasets.findings import Finding
from damex.datasets.pixels import read_pixels
from damex.datasets.spec import SPLITS, Source, parse_mixture
from damex.errors import printable
from damex.files import atomic_write, make_folder, write_text
from damex.inference.drawing import Color, draw_boxes, palette
from damex.progress import Bar
from damex.workbench.check.sources import (
    class_mappings,
    expectations,
    mixture_config_of,
    read_source,
    sources_of,
)
from damex.workbench.zero_config import run_name

# COCO's limits of small, medium and large: the side of a square in pixels.
SMALL, LARGE = 32, 96
# Sides of boxes from 1 to 2048 px, two bins for each doubling.
EDGES = 2.0 ** np.arange(0, 11.5, 0.5)
CHART_WIDTH, CHART_HEIGHT = 320, 110
TICKS = (4, 16, SMALL, LARGE, 256, 1024)
SIZE_STEP = 32  # image sizes are binned to limit the circles of a chart
SIZE_CHART = 150
TILE = 400
COLUMNS = 4
MAX_NAMES = 12  # of the largest boxes: more would hide the image
GAP, TITLE, CAPTION = 8, 40, 18
PAPER, INK = (250, 250, 248), (30, 30, 30)

Tiles = Sequence[tuple[str, Image.Image]]  # captions and pictures


class Sample(NamedTuple):
    """A shown image; ``boxes`` are class name and left, top, width, height, in px."""

    path: Path
    name: str
    boxes: Sequence[tuple[str, Sequence[float]]]
    applies_exif: bool


@dataclass(frozen=True)
class SplitView:
    """Numbers and samples of one split: B boxes, M images."""

    dataset: str
    split: str
    file: str
    counts: Mapping[str, int]  # of boxes, by class name in the mixture
    side_B: np.ndarray  # of the square with the area of each box, in pixels
    size_M2: np.ndarray  # width and height of the images
    samples: Sequence[Sample]

    @property
    def title(self) -> str:
        """Dataset and split."""
        return f"{self.dataset}, {self.split}"


def browse(
    data: Sequence[str],
    *,
    cfg_options: Sequence[str],
    out: str | None,
    samples: int,
    seed: int,
) -> None:
    """Write a page about datasets, and contact sheets of their splits."""
    cfg = mixture_config_of(data, cfg_options)
    names = [entry["name"] for entry in cfg["mixture"]]
    name = Path(cfg.filename).stem if cfg.filename else run_name(names)
    folder = Path(out or Path("work_dirs") / name / "browse")
    make_folder(folder)
    with Bar() as progress:
        views, notes = _read(cfg, progress, num_samples=samples, seed=seed)
        colors = palette(dict.fromkeys(name for view in views for name in view.counts))
        tiles: dict[str, list[tuple[str, Any]]] = defaultdict(list)
        for view in views:
            progress.begin(f"draw {view.title}", len(view.samples))
            for sample in view.samples:
                tiles[view.title].append((sample.name, draw_tile(sample, colors)))
                progress.step()
    for view in views:
        with atomic_write(folder / f"{view.dataset}_{view.split}.png") as part:
            contact_sheet(view.title, tiles[view.title]).save(part)
    page = render(f"Data of {name}", views, tiles, colors, notes)
    write_text(folder / "index.html", printable(page))
    print(f"{folder / 'index.html'}: {len(views)} splits, with a contact sheet each.")


def _read(
    cfg: Mapping[str, Any], progress: Bar, *, num_samples: int, seed: int
) -> tuple[list[SplitView], list[str]]:
    """Views of all splits, and sentences about those that cannot be read."""
    views: dict[str, SplitView] = {}
    specs = parse_mixture(cfg["mixture"])
    mappings, problem = class_mappings(cfg, specs)
    notes: list[str] = []
    for spec, mapping in zip(specs, mappings, strict=True):
        for source in sources_of(spec, SPLITS):
            if isinstance(source, Finding):
                notes.append(source.message)
                continue
            file, split = source.location.file, source.location.split
            progress.begin(f"read {file}", None)
            expected = expectations(cfg, spec, split, mapping)
            rename, rng = mapping or spec.rename, random.Random(seed)
            view = view_of(source, expected, rename, num_samples, rng)
            if view is None:
                notes.append(f"{file} cannot be read; run check.")
            elif views.setdefault(view.title, view) is not view:
                notes.append(f"{file} is another file of this split.")
    return [*views.values()], notes or [problem] * bool(problem)


def render(
    title: str,
    views: Sequence[SplitView],
    tiles: Mapping[str, Tiles],
    colors: Mapping[str, Color],
    notes: Sequence[str],
) -> str:
    """Render the page: tiles by title of a view, and notes on what is not shown."""
    of_dataset: dict[str, list[SplitView]] = {}
    for view in views:
        of_dataset.setdefault(view.dataset, []).append(view)
    octaves = np.log2(EDGES[-1])
    ticks = [(float(np.log2(tick) / octaves * CHART_WIDTH), tick) for tick in TICKS]
    return render_page(
        "damex.workbench.check",
        title=title,
        notes=notes,
        datasets=[
            dict(name=name, splits=_splits(own, tiles, colors))
            for name, own in of_dataset.items()
        ],
        classes=_class_rows(of_dataset, colors),
        num_images=sum(len(view.size_M2) for view in views),
        num_boxes=sum(sum(view.counts.values()) for view in views),
        chart=dict(width=CHART_WIDTH, height=CHART_HEIGHT, ticks=ticks),
        size_chart=SIZE_CHART,
    )


def render_page(package: str, **values: Any) -> str:
    """Render the ``page.html`` of a package."""
    environment = Environment(loader=PackageLoader(package, ""), autoescape=True)
    return environment.get_template("page.html").render(**values)


def _splits(
    views: Sequence[SplitView], tiles: Mapping[str, Tiles], colors: Mapping[str, Color]
) -> list[dict[str, Any]]:
    """Contents of the splits of one dataset, whose charts have the same scale."""
    histograms = [_histogram(view) for view in views]
    top = max(map(max, histograms))
    largest = max(float(view.size_M2.max(initial=1)) for view in views)
    found = []
    for view, histogram in zip(views, histograms, strict=True):
        num_boxes = sum(view.counts.values())
        rows = sorted(view.counts.items(), key=lambda item: -item[1])
        found.append(
            dict(
                name=view.split,
                file=view.file,
                num_images=len(view.size_M2),
                num_boxes=num_boxes,
                per_image=num_boxes / max(len(view.size_M2), 1),
                shares=size_shares(view.side_B),
                curve=_curve(histogram, top),
                sizes=_circles(view.size_M2, largest),
                size_words=_size_words(view.size_M2),
                legend=[(name, css_color(colors[name]), n) for name, n in rows],
                tiles=[dict(name=n, uri=data_uri(t)) for n, t in tiles[view.title]],
            )
        )
    return found


def size_shares(side_B: np.ndarray) -> list[float]:
    """Shares of small, medium and large boxes; zeros without any box."""
    counts, _ = np.histogram(side_B, (0, SMALL, LARGE, math.inf))
    return (counts / max(len(side_B), 1)).tolist()


def _class_rows(
    of_dataset: Mapping[str, Sequence[SplitView]], colors: Mapping[str, Color]
) -> list[dict[str, Any]]:
    """A row for each class with its counts per dataset; common classes first."""
    total: Counter[str] = Counter()
    for view in itertools.chain(*of_dataset.values()):
        total.update(view.counts)
    rows = []
    for name in sorted(total, key=lambda name: (-total[name], name)):
        cells = [
            [(view.split, view.counts.get(name, 0)) for view in views]
            if any(name in view.counts for view in views)
            else None
            for views in of_dataset.values()
        ]
        color = css_color(colors[name])
        rows.append(dict(name=name, color=color, cells=cells, total=total[name]))
    return rows


def _histogram(view: SplitView) -> list[float]:
    """Share of the boxes in each bin of sides."""
    sides_B = np.clip(view.side_B, EDGES[0], EDGES[-1] - 1e-6)
    counts, _ = np.histogram(sides_B, EDGES)
    return (counts / max(len(sides_B), 1)).tolist()


def _curve(shares: Sequence[float], top: float) -> str:
    """Points of an SVG polyline."""
    step = CHART_WIDTH / len(shares)
    height = (CHART_HEIGHT - 20) / (top or 1.0)
    return " ".join(
        f"{(i + 0.5) * step:.1f},{CHART_HEIGHT - 16 - share * height:.1f}"
        for i, share in enumerate(shares)
    )


def _circles(size_M2: np.ndarray, largest: float) -> list[tuple[float, float, float]]:
    """Center and radius for each image size; the area is the share of images."""
    steps_M2 = np.round(size_M2 / SIZE_STEP) * SIZE_STEP
    sizes, counts = np.unique(steps_M2, axis=0, return_counts=True)
    scale = (SIZE_CHART - 20) / max(largest, 1.0)
    return [
        (w * scale, SIZE_CHART - h * scale, 2 + 8 * (count / len(size_M2)) ** 0.5)
        for (w, h), count in zip(sizes.tolist(), counts.tolist(), strict=True)
    ]


def _size_words(size_M2: np.ndarray) -> str:
    if len(size_M2) == 0:
        return "no image sizes"
    sizes, counts = np.unique(size_M2, axis=0, return_counts=True)
    width, height = sizes[counts.argmax()]
    words = f"{counts.max() / counts.sum():.0%} are {width:g} x {height:g}"
    low, high = size_M2.min(axis=0), size_M2.max(axis=0)
    if len(sizes) > 1:
        words += f"; {low[0]:g} to {high[0]:g} wide, {low[1]:g} to {high[1]:g} high"
    return words


def css_color(color: Color) -> str:
    """Return a color as HTML writes it."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def data_uri(picture: Image.Image) -> str:
    """Return a picture as a JPEG in the address of an HTML image."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def view_of(
    source: Source,
    expected: Expectations,
    rename: Mapping[str, str],
    num_samples: int,
    rng: random.Random,
) -> SplitView | None:
    """View of a source with ``num_samples`` random images; None if unreadable."""
    document, _ = read_source(source)
    records, _ = parse_records(document, source.location, expected.classes)
    if records is None:
        return None
    used_N = used_boxes(records, expected) & records.is_box_N
    box_B4 = records.box_N4[used_N]
    name_of = {
        key: rename.get(name, name)
        for key, name in records.categories.items()
        if name and expected.uses(name)
    }
    rows = itertools.compress(records.annotations, used_N)
    names = [name_of.get(row["category_id"], "") for row in rows]
    images = records.image_N[used_N].tolist()
    drawn: dict[int, list[tuple[str, list[float]]]] = {}
    for name, image, box in zip(names, images, box_B4.tolist(), strict=True):
        drawn.setdefault(image, []).append((name, box))
    samples = []
    for image in _choose(names, images, len(records.images), num_samples, rng):
        name = str(records.images[image].get("file_name"))
        shown = [box for box in drawn.get(image, ()) if np.isfinite(box[1]).all()]
        samples.append(Sample(source.images / name, name, shown, expected.applies_exif))
    counts = Counter(names)
    area_B = box_B4[:, 2:].clip(0).prod(axis=1)
    return SplitView(
        dataset=source.location.dataset,
        split=source.location.split,
        file=source.location.file,
        counts={name: counts[name] for name in dict.fromkeys(name_of.values())},
        side_B=np.sqrt(area_B[np.isfinite(area_B)]),
        size_M2=records.size_M2[np.isfinite(records.size_M2).all(axis=1)],
        samples=samples,
    )


def _choose(
    names: Sequence[str],
    images: Sequence[int],
    num_images: int,
    num_samples: int,
    rng: random.Random,
) -> list[int]:
    """Draw an image for each class, the rarest first, and any others after these.

    ``names`` and ``images`` are of each box: its class, and the number of its image.
    """
    images_of: dict[str, list[int]] = {}
    classes_of: dict[int, set[str]] = {}
    for name, image in zip(names, images, strict=True):
        if image >= 0:  # it is listed
            images_of.setdefault(name, []).append(image)
            classes_of.setdefault(image, set()).add(name)
    chosen: list[int] = []
    shown: set[str] = set()
    for name in sorted(images_of, key=lambda name: len(images_of[name])):
        if name not in shown and len(chosen) < num_samples:
            chosen.append(rng.choice(images_of[name]))
            shown |= classes_of[chosen[-1]]
    others = sorted({*range(num_images)} - {*chosen})
    return chosen + rng.sample(others, min(num_samples - len(chosen), len(others)))


def draw_tile(sample: Sample, colors: Mapping[str, Color]) -> Image.Image:
    """An image as training loads it, with the boxes of its file.

    Boxes are not rescaled to the stated image size: if that is wrong, they are
    misplaced here as in training.
    """
    flag = "color" if sample.applies_exif else "color_ignore_orientation"
    try:
        image = Image.fromarray(read_pixels(sample.path, flag).image[..., ::-1])
    except Exception as error:  # a missing file, or one that OpenCV does not read
        return _broken(error)
    scale = TILE / max(image.size)
    size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
    tile_HWC = np.asarray(image.resize(size, Image.Resampling.LANCZOS))
    boxes = sorted(sample.boxes, key=lambda box: abs(box[1][2] * box[1][3]))
    box_N4 = scale * np.array([box for _, box in boxes]).reshape(-1, 4)
    corner_N22 = np.stack([box_N4[:, :2], box_N4[:, :2] + box_N4[:, 2:]], axis=1)
    corner_N4 = np.sort(corner_N22, axis=1).reshape(-1, 4)  # sides may be below 0
    names = [name or "?" for name, _ in boxes]
    labels = [""] * max(len(names) - MAX_NAMES, 0) + names[-MAX_NAMES:]
    inks = [colors.get(name, INK) for name in names]
    return Image.fromarray(draw_boxes(tile_HWC, corner_N4, labels, inks))


def contact_sheet(title: str, samples: Tiles) -> Image.Image:
    """Rows of captioned tiles below a title."""
    columns = min(COLUMNS, max(len(samples), 1))
    starts = range(0, len(samples), columns)
    rows = [samples[start : start + columns] for start in starts]
    heights = [max(tile.height for _, tile in row) + CAPTION for row in rows]
    width = columns * (TILE + GAP) + GAP
    sheet = Image.new("RGB", (width, sum(heights) + GAP * len(rows) + TITLE), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    words = " ".join(title.split())
    draw.text((GAP, 8), words, fill=INK, font=ImageFont.load_default(20))
    top = TITLE
    for row, height in zip(rows, heights, strict=True):
        for column, (caption, tile) in enumerate(row):
            left = GAP + column * (TILE + GAP)
            sheet.paste(tile, (left, top))
            text = " ".join(caption.split())
            while font.getlength(text) > TILE and len(text) > 4:
                text = "..." + text[4:]  # the end of a path tells more
            draw.text((left, top + tile.height + 2), text, fill=INK, font=font)
        top += height + GAP
    return sheet


def _broken(error: Exception) -> Image.Image:
    tile = Image.new("RGB", (TILE, TILE // 2), (225, 225, 220))
    text = f"cannot be opened:\n{type(error).__name__}"
    ImageDraw.Draw(tile).text((12, 12), text, fill=INK, font=ImageFont.load_default(16))
    return tile
