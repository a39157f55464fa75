"""The page about the experts of a checkpoint: tables, heat maps, regions, curves.

Axes: E experts, R rows of the tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from damex.curation.sheets import Color, palette
from damex.datasets.label_space import LabelSpace
from damex.files import css_color, data_uri, fill
from damex.inference.look.history import Curve, History
from damex.inference.look.samples import Row
from damex.inference.look.watch import Example, Watched
from damex.moe import LayerTally, entropy, mutual_information

CHART_WIDTH, CHART_HEIGHT = 320, 140
OPACITY = 0.45  # of experts over an image
NOBODY: Color = (0, 0, 0)
SCORES = ("images", "boxes", "AP", "AP50", "routing_accuracy")


@dataclass(frozen=True)
class LayerUse:
    """Expert usage of a layer; entropy and information are in nats.

    Attributes:
        share_RE: Share of each row's tokens that an expert takes.
        load_E: Mean of ``share_RE`` over rows.
        most_entropy: Entropy of a uniform load.
        information: Mutual information of row and expert, rows weighted equally.
        most_information: Its maximum for these numbers of rows and experts.
    """

    name: str
    share_RE: np.ndarray
    load_E: np.ndarray
    entropy: float
    most_entropy: float
    information: float
    most_information: float
    unused: Sequence[int]

    @classmethod
    def of(cls, name: str, tally: LayerTally) -> LayerUse:
        """Compute the numbers from the routes of a layer."""
        share_RE = tally.counts_GE.double() / tally.tokens_G.clamp_min(1)[:, None]
        seen_RE = share_RE[tally.tokens_G > 0]
        load_E = seen_RE.mean(0)
        rows, experts = seen_RE.shape
        return cls(
            name=name,
            share_RE=share_RE.numpy(),
            load_E=load_E.numpy(),
            entropy=float(entropy(load_E)),
            most_entropy=math.log(experts),
            # + 0.0: rounding can leave a negative zero
            information=max(float(mutual_information(seen_RE)), 0.0) + 0.0,
            most_information=math.log(min(rows, experts)),
            unused=tally.unused,
        )


def render(
    *,
    title: str,
    about: str,
    space: LabelSpace,
    rows: Sequence[Row],
    watched: Watched,
    kinds: Mapping[str, str],
    history: History,
    notes: Sequence[str],
    alarms: Sequence[str],
) -> str:
    """Render the page as self-contained HTML.

    Args:
        title: Page title.
        about: A line about the checkpoint.
        space: Datasets and classes.
        rows: Images by row.
        watched: Routes and examples.
        kinds: Gate and experts of each layer, in words.
        history: Scores and curves.
        notes: Missing parts.
        alarms: Faults in the load of experts.
    """
    num_experts = max(len(t.share_E) for t in watched.served.values())
    colors = [*palette(f"expert {e}" for e in range(num_experts)).values()]
    uses = [LayerUse.of(name, tally) for name, tally in watched.served.items()]
    alone = {name: LayerUse.of(name, t) for name, t in watched.chosen.items()}
    return fill(
        "damex.inference.look",
        title=title,
        about=about,
        notes=notes,
        alarms=alarms,
        datasets=_datasets(space, history.scores),
        rows=[(row.name, len(row.paths)) for row in rows],
        layers=uses,
        alone=alone,
        tables=_tables(uses, alone),
        kinds=kinds,
        colors=[css_color(color) for color in colors],
        examples=[_tiles(example, rows, colors) for example in watched.examples],
        charts=[_chart(title, found) for title, found in history.charts.items()],
        chart=dict(width=CHART_WIDTH, height=CHART_HEIGHT),
    )


def _tables(
    uses: Sequence[LayerUse], alone: Mapping[str, LayerUse]
) -> list[tuple[LayerUse, str, str]]:
    """Heat maps: numbers, link anchor, and suffix of the name."""
    tables = []
    for use in uses:
        tables.append((use, use.name, ""))
        if use.name in alone:
            tables.append((alone[use.name], "", ", tokens alone"))
    return tables


def _datasets(space: LabelSpace, scores: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row of the mixture table for each dataset; None for unknown numbers."""
    found = []
    for number, name in enumerate(space.dataset_names):
        known = {key: scores.get(f"mixture/{name}/{key}") for key in SCORES}
        classes = [space.classes[label] for label in space.valid_labels(number)]
        found.append(
            dict(name=name, group=space.groups[number], classes=classes, **known)
        )
    return found


def _tiles(
    example: Example, rows: Sequence[Row], colors: Sequence[Color]
) -> dict[str, Any]:
    """An image next to a copy colored by experts."""
    layers = {
        name: [data_uri(paint(example.picture, places, colors)) for places in maps]
        for name, maps in example.regions.items()
        if maps
    }
    return dict(
        row=rows[example.row].name,
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
    table = np.array([*colors, NOBODY], dtype=np.uint8)
    layer = Image.fromarray(table[np.minimum(expert_HW, len(colors))])
    return Image.blend(picture.convert("L").convert("RGB"), layer, OPACITY)


def _chart(title: str, found: Mapping[str, Curve]) -> dict[str, Any]:
    """Curves as SVG polylines, with the ends of both axes."""
    points = [point for curve in found.values() for point in curve]
    (left, right), (low, high) = (
        (min(column), max(column)) for column in zip(*points, strict=True)
    )
    low = min(low, 0.0)
    wide, tall = right - left, high - low
    width, height = CHART_WIDTH - 8, CHART_HEIGHT - 24

    def place(x: float, y: float) -> str:
        across = (x - left) / wide if wide else 0.5
        return f"{4 + across * width:.1f},{4 + (high - y) / (tall or 1) * height:.1f}"

    colors = palette(found)
    lines = [
        dict(
            name=name,
            color=css_color(colors[name]),
            points=[place(*point) for point in curve],
            last=curve[-1][1],
        )
        for name, curve in found.items()
    ]
    return dict(title=title, lines=lines, left=left, right=right, low=low, high=high)
