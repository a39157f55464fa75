"""``damex experts``: the routing report of a checkpoint, as a table and an HTML page.

Axes: E experts, R rows of the tables.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.device import get_device
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

import damex.registry  # noqa: F401  (first: it keeps mmdet silent)
from damex.drawing import Color, palette
from damex.engine.console import filter_console
from damex.engine.hooks import LEAST_EVENNESS, routing_faults
from damex.engine.optim import length_key
from damex.engine.rows import has_groups
from damex.errors import ConfigError, DataError, printable
from damex.files import css_color, data_uri, fill, make_folder, write_text
from damex.inference.media import find_images, names_of
from damex.inference.routing_recorder import Example, Recorded, Recorder, Row
from damex.inference.stored import StoredDetector, millions
from damex.models.insertion import moe_blocks
from damex.moe import LayerTally, entropy, mutual_information
from damex.progress import Bar

CHART_WIDTH, CHART_HEIGHT = 320, 140
OPACITY = 0.45  # of experts over an image
NO_EXPERT: Color = (0, 0, 0)
SCORES = ("images", "boxes", "AP", "AP50", "routing_accuracy")
# Title of a chart, and the scalars that it shows.
CHARTS = {
    "AP of each dataset": r"mixture/(?!mean/|pooled/)(?P<curve>.+)/AP",
    "Losses of the routers": r"(?P<curve>loss_moe_.+)",
    "Routing accuracy in training": r"(?P<curve>moe_routing_accuracy)",
    "Evenness of each layer": r"routing/(?P<curve>.+)/evenness",
    "Load of {layer}": r"routing/(?P<layer>.+)/(?P<curve>expert_\d+)",
}

Curves = dict[str, list[tuple[float, float]]]  # points by name
History = tuple[dict[str, float], dict[str, Curves], str]


def experts(
    checkpoint: str,
    *,
    images: Sequence[str],
    out: str | None,
    images_per_dataset: int,
    examples: int,
    batch_size: int,
    device: str | None,
    trust: bool,
) -> int:
    """Write a page about the experts; return 1 if an image could not be read."""
    filter_console()
    stored = StoredDetector.read(checkpoint, trust=trust)
    recorder = Recorder(stored, device=device or get_device())
    notes: list[str] = []
    if images:
        rows = rows_of_words(images)
    else:
        rows, notes = rows_of_mixture(stored, per_dataset=images_per_dataset)
    page = Path(out or Path(checkpoint).with_suffix("").name + "_experts", "index.html")
    make_folder(page.parent)
    with Bar() as bar:
        bar.begin("images", sum(len(row.paths) for row in rows))
        found = recorder.record(
            rows,
            examples_per_row=examples,
            batch_size=batch_size,
            advance=bar.step,
        )
    train_cfg = stored.config.get("train_cfg") or {}
    scores, charts, note = read_history(Path(checkpoint), stored.meta, train_cfg)
    notes += found.faults + [note] * bool(note)
    blocks = moe_blocks(recorder.detector)
    # Whose experts images should use is unknown if the user names them.
    unknown = {block.name for block in blocks if images and has_groups(block)}
    judged = {name: t for name, t in found.served.items() if name not in unknown}
    alarms = routing_faults(judged, least_evenness=LEAST_EVENNESS)
    epoch = stored.meta.get("epoch")
    content = _content(found, blocks) | dict(
        title=f"Experts of {Path(checkpoint).name}",
        about=f"{checkpoint}: {stored.model.get('type')}, "
        f"{millions(stored.state)} million parameters"
        + (f", epoch {epoch}" if epoch is not None else ""),
        notes=notes,
        alarms=alarms,
        datasets=_datasets(stored, scores),
        rows=[(row.name, len(row.paths)) for row in rows],
        charts=[_chart(title, curves) for title, curves in charts.items()],
    )
    write_text(page, fill("damex.inference", **content))
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(_table(content["layers"], content["alone"]))
    for line in (*(f"warning: {alarm}" for alarm in alarms), *notes):
        console.print(printable(line))
    console.print(f"written: {page}")
    return 1 if found.faults else 0


def _content(found: Recorded, blocks: Sequence[Any]) -> dict[str, Any]:
    """Values of the page template that depend on the routes."""
    layers = [LayerUse(name, tally) for name, tally in found.served.items()]
    names = [f"expert {e}" for e in range(max(len(use.load_E) for use in layers))]
    colors = [*palette(names).values()]
    return dict(
        layers=layers,
        alone={name: LayerUse(name, tally) for name, tally in found.chosen.items()},
        kinds={
            block.name: f"{type(block.moe.gate).__name__}, "
            f"{block.moe.num_experts} {type(block.moe.experts).__name__}"
            for block in blocks
        },
        colors=[css_color(color) for color in colors],
        examples=[_tiles(example, colors) for example in found.examples],
        chart=dict(width=CHART_WIDTH, height=CHART_HEIGHT),
    )


def rows_of_words(words: Sequence[str]) -> list[Row]:
    """Group the images of words (see `find_images`) into one row per folder."""
    folders: dict[Path, list[Path]] = {}
    for path in find_images(words):
        folders.setdefault(path.absolute().parent, []).append(path)
    rows = zip(names_of([*folders]), folders.values(), strict=True)
    return [Row(name, None, paths) for name, paths in rows]


def rows_of_mixture(
    stored: StoredDetector, *, per_dataset: int
) -> tuple[list[Row], list[str]]:
    """Sample validation images: rows, and a sentence about each dataset without any."""
    rows, notes = [], []
    for number, name in enumerate(stored.space.dataset_names):
        try:
            paths = stored.validation_images(name, count=per_dataset)
            rows.append(Row(name, stored.space.group_id(number), paths))
        except (ConfigError, DataError) as error:
            notes.append(f"No images of {name}: {error}")
    if not rows:
        raise DataError(
            f"the validation images of {', '.join(stored.space.dataset_names)} are not "
            f"where the training had them (seen from {Path.cwd()}); name some with "
            "--images, a folder for each dataset."
        )
    return rows, notes


class LayerUse:
    """Expert usage of a layer; entropy and information are in nats.

    Attributes:
        share_RE: Share of each row's tokens that an expert takes.
        load_E: Mean of ``share_RE`` over rows with tokens.
        most_entropy: Entropy of a uniform load.
        information: Mutual information of row and expert, rows weighted equally.
        most_information: Its maximum for these numbers of rows and experts.
        unused: Experts without tokens.
    """

    def __init__(self, name: str, tally: LayerTally) -> None:
        share_RE = tally.counts_GE.double() / tally.tokens_G.clamp_min(1)[:, None]
        seen_RE = share_RE[tally.tokens_G > 0]
        self.name, self.unused = name, tally.unused
        self.share_RE, self.load_E = share_RE.numpy(), seen_RE.mean(0).numpy()
        self.entropy = float(entropy(seen_RE.mean(0)))
        self.most_entropy = math.log(seen_RE.shape[1])
        # + 0.0: rounding can leave a negative zero
        self.information = max(float(mutual_information(seen_RE)), 0.0) + 0.0
        self.most_information = math.log(min(seen_RE.shape))


def _table(uses: Sequence[LayerUse], alone: Mapping[str, LayerUse]) -> Table:
    """Summary of the layers."""
    table = Table(box=box.SIMPLE)
    table.add_column("layer", no_wrap=True)
    columns = ["entropy of use", "information", "busiest", "unused"]
    for column in [*columns, *(["alone"] if alone else ())]:
        table.add_column(column, justify="right", no_wrap=True)
    for use in uses:
        busiest = int(use.load_E.argmax())
        cells = [
            use.name,
            f"{use.entropy:.2f} of {use.most_entropy:.2f}",
            f"{use.information:.2f} of {use.most_information:.2f}",
            f"{busiest}: {use.load_E[busiest]:.1%}",
            ", ".join(map(str, use.unused)) or "-",
        ]
        if alone:
            one = alone.get(use.name)
            cells.append("-" if one is None else f"{one.information:.2f}")
        table.add_row(*cells)
    return table


def _datasets(
    stored: StoredDetector, scores: Mapping[str, float]
) -> list[dict[str, Any]]:
    """A row of the mixture table for each dataset; None for unknown numbers."""
    space = stored.space
    return [
        dict(
            name=name,
            group=space.groups[number],
            classes=[space.classes[label] for label in space.valid_labels(number)],
            **{key: scores.get(f"mixture/{name}/{key}") for key in SCORES},
        )
        for number, name in enumerate(space.dataset_names)
    ]


def _tiles(example: Example, colors: Sequence[Color]) -> dict[str, Any]:
    """An image next to a copy colored by experts."""
    layers = {
        name: [data_uri(paint(example.picture, places, colors)) for places in maps]
        for name, maps in example.regions.items()
        if maps
    }
    return dict(
        row=example.row,
        name=example.path.name,
        picture=data_uri(example.picture),
        layers=layers,
        elected=example.elected,
    )


def paint(
    picture: Image.Image, expert_HW: np.ndarray, colors: Sequence[Color]
) -> Image.Image:
    """Overlay a picture, in gray, with the colors of experts.

    ``expert_HW`` is the expert of each pixel, ``len(colors)`` for none.
    """
    table = np.array([*colors, NO_EXPERT], dtype=np.uint8)
    layer = Image.fromarray(table[np.minimum(expert_HW, len(colors))])
    return Image.blend(picture.convert("L").convert("RGB"), layer, OPACITY)


def _chart(title: str, curves: Curves) -> dict[str, Any]:
    """Curves as SVG polylines, with the ends of both axes."""
    points = [point for curve in curves.values() for point in curve]
    (left, right), (low, high) = (
        (min(column), max(column)) for column in zip(*points, strict=True)
    )
    low = min(low, 0.0)
    wide, tall = right - left, high - low
    width, height = CHART_WIDTH - 8, CHART_HEIGHT - 24

    def place(x: float, y: float) -> str:
        across = (x - left) / wide if wide else 0.5
        return f"{4 + across * width:.1f},{4 + (high - y) / (tall or 1) * height:.1f}"

    colors = palette(curves)
    lines = [
        dict(
            name=name,
            color=css_color(colors[name]),
            points=[place(*point) for point in curve],
            last=curve[-1][1],
        )
        for name, curve in curves.items()
    ]
    return dict(title=title, lines=lines, left=left, right=right, low=low, high=high)


def read_history(
    checkpoint: Path, meta: Mapping[str, Any], train_cfg: Mapping[str, Any]
) -> History:
    """Read the log of the run that wrote a checkpoint, ``vis_data/scalars.json``.

    Returns the metrics of the evaluation of this checkpoint, charts by title, and a
    sentence about missing parts. ``meta`` is of the checkpoint: its ``experiment_name``
    ends in the name of the log folder.
    """
    found = re.search(r"_(\d{8}_\d{6})$", str(meta.get("experiment_name", "")))
    folder = checkpoint.parent / (found.group(1) if found else "")
    path = folder / "vis_data" / "scalars.json"
    if not path.is_file():
        scores = _scores_of_summary(checkpoint)
        missing = "No curves" if scores else "No curves and no AP"
        return scores, {}, f"{missing}: {path} of the training is missing."
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(dict(json.loads(text)))
        except (ValueError, TypeError):  # a killed run leaves a partial line
            continue
    step = meta.get(length_key(train_cfg)[4:-1], "unknown")
    scores = {}
    for line in lines:
        mine = {k: v for k, v in line.items() if k.startswith("mixture/")}
        if line.get("step") == step:
            scores = mine or scores
    note = "" if scores else f"No AP: {path} has no evaluation of this checkpoint."
    return scores, _charts(lines), note


def _charts(lines: Iterable[Mapping[str, Any]]) -> dict[str, Curves]:
    """Points of all scalars of `CHARTS`."""
    charts: dict[str, Curves] = {}
    scalars = [(line, key, value) for line in lines for key, value in line.items()]
    for title, pattern in CHARTS.items():
        for line, key, value in scalars:
            match = re.fullmatch(pattern, key)
            if match and isinstance(value, (int, float)) and math.isfinite(value):
                curves = charts.setdefault(title.format(**match.groupdict()), {})
                points = curves.setdefault(match["curve"], [])
                points.append((float(line.get("step", len(points))), float(value)))
    return charts


def _scores_of_summary(checkpoint: Path) -> dict[str, float]:
    """Metrics in ``summary.json`` if of this checkpoint, the last of its run."""
    folder = checkpoint.parent
    try:
        last = (folder / "last_checkpoint").read_text(encoding="utf-8").strip()
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rows = {name: dict(row) for name, row in summary["datasets"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    if Path(last).name != checkpoint.name:
        return {}
    for name, accuracy in summary.get("routing_accuracy", {}).items():
        rows.setdefault(name, {})["routing_accuracy"] = accuracy
    return {
        f"mixture/{name}/{key.upper() if key.startswith('ap') else key}": value
        for name, row in rows.items()
        for key, value in row.items()
    }
