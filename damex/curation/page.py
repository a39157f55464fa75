"""Self-contained HTML page about a mixture: tables, charts and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from damex.curation.sheets import Color
from damex.curation.views import LARGE, SMALL, SplitView
from damex.files import css_color, data_uri, fill

# Sides of boxes from 1 to 2048 px, two bins for each doubling.
EDGES = 2.0 ** np.arange(0, 11.5, 0.5)
CHART_WIDTH, CHART_HEIGHT = 320, 110
TICKS = (4, 16, SMALL, LARGE, 256, 1024)
# Image sizes are binned to limit the circles of a chart.
SIZE_STEP = 32
SIZE_CHART = 150


def render(
    title: str,
    views: Sequence[SplitView],
    tiles: Mapping[str, Sequence[tuple[str, Image.Image]]],
    colors: Mapping[str, Color],
    notes: Sequence[str],
) -> str:
    """Render the page; views of a dataset must be consecutive.

    Args:
        title: Page title.
        views: The splits.
        tiles: Title of a view -> captions and pictures of its samples.
        colors: Color of each class.
        notes: What could not be shown.
    """
    names = dict.fromkeys(view.dataset for view in views)
    datasets = [
        _dataset(name, [view for view in views if view.dataset == name], tiles, colors)
        for name in names
    ]
    return fill(
        "damex.curation",
        title=title,
        notes=notes,
        datasets=datasets,
        classes=_class_rows(views, [*names], colors),
        num_images=sum(len(view.size_M2) for view in views),
        num_boxes=sum(sum(view.counts.values()) for view in views),
        chart=dict(width=CHART_WIDTH, height=CHART_HEIGHT, ticks=_ticks()),
        size_chart=SIZE_CHART,
    )


def _dataset(
    name: str,
    views: Sequence[SplitView],
    tiles: Mapping[str, Sequence[tuple[str, Image.Image]]],
    colors: Mapping[str, Color],
) -> dict[str, Any]:
    top = max((max(_histogram(view)) for view in views), default=1.0)
    largest = max((view.size_M2.max(initial=1) for view in views), default=1)
    return dict(
        name=name,
        splits=[
            dict(
                name=view.split,
                file=view.file,
                num_images=len(view.size_M2),
                num_boxes=sum(view.counts.values()),
                per_image=sum(view.counts.values()) / max(len(view.size_M2), 1),
                shares=view.shares(),
                curve=_curve(_histogram(view), top),
                sizes=_circles(view, float(largest)),
                size_words=_size_words(view),
                legend=_legend(view, colors),
                tiles=[dict(name=n, uri=data_uri(t)) for n, t in tiles[view.title]],
            )
            for view in views
        ],
    )


def _class_rows(
    views: Sequence[SplitView], datasets: Sequence[str], colors: Mapping[str, Color]
) -> list[dict[str, Any]]:
    """A row for each class with its counts per dataset; common classes first."""
    total: dict[str, int] = {}
    for view in views:
        for name, count in view.counts.items():
            total[name] = total.get(name, 0) + count
    rows = []
    for name in sorted(total, key=lambda name: (-total[name], name)):
        cells = []
        for dataset in datasets:
            own = [view for view in views if view.dataset == dataset]
            has_class = any(name in view.counts for view in own)
            counts = [(view.split, view.counts.get(name, 0)) for view in own]
            cells.append(counts if has_class else None)
        rows.append(
            dict(
                name=name,
                color=css_color(colors[name]),
                cells=cells,
                total=total[name],
            )
        )
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


def _ticks() -> list[tuple[float, int]]:
    octaves = np.log2(EDGES[-1])
    return [(float(np.log2(t) / octaves * CHART_WIDTH), t) for t in TICKS]


def _circles(view: SplitView, largest: float) -> list[tuple[float, float, float]]:
    """Center and radius for each image size; the area is the share of images."""
    if len(view.size_M2) == 0:
        return []
    steps = np.round(view.size_M2 / SIZE_STEP) * SIZE_STEP
    sizes, counts = np.unique(steps, axis=0, return_counts=True)
    scale = (SIZE_CHART - 20) / max(largest, 1.0)
    rows = zip(sizes.tolist(), (counts / counts.sum()).tolist(), strict=True)
    return [
        (width * scale, SIZE_CHART - height * scale, 2 + 8 * share**0.5)
        for (width, height), share in rows
    ]


def _size_words(view: SplitView) -> str:
    if len(view.size_M2) == 0:
        return "no image sizes"
    sizes, counts = np.unique(view.size_M2, axis=0, return_counts=True)
    width, height = sizes[counts.argmax()]
    words = f"{counts.max() / counts.sum():.0%} are {width:g} x {height:g}"
    low, high = view.size_M2.min(axis=0), view.size_M2.max(axis=0)
    if len(sizes) > 1:
        words += f"; {low[0]:g} to {high[0]:g} wide, {low[1]:g} to {high[1]:g} high"
    return words


def _legend(view: SplitView, colors: Mapping[str, Color]) -> list[tuple[str, str, int]]:
    rows = sorted(view.counts.items(), key=lambda item: -item[1])
    return [(name, css_color(colors[name]), count) for name, count in rows]
