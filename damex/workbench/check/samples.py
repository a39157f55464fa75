"""Numbers of a split, and a choice of its images with their boxes drawn."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from damex.datasets.coco_records import parse_records, used_boxes
from damex.datasets.coco_schema import Expectations
from damex.datasets.pixels import read_pixels
from damex.datasets.spec import Source
from damex.inference.drawing import Color, draw_boxes
from damex.workbench.check.sources import read_source

TILE = 400
COLUMNS = 4
# Only the largest boxes get names, as more would hide the image.
MAX_NAMES = 12
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
    """Numbers and samples of one split: B boxes, M images.

    Args:
        counts: Class name in the mixture -> number of boxes.
        side_B: Side of the square with the area of each box, in pixels.
        size_M2: Width and height of the images.
    """

    dataset: str
    split: str
    file: str
    counts: Mapping[str, int]
    side_B: np.ndarray
    size_M2: np.ndarray
    samples: Sequence[Sample]

    @property
    def title(self) -> str:
        """Dataset and split."""
        return f"{self.dataset}, {self.split}"


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
    font = ImageFont.load_default(16)
    ImageDraw.Draw(tile).text((12, 12), text, fill=INK, font=font)
    return tile
