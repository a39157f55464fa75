"""Windows of images: where they lie, and which datasets need them.

Axes: N annotations.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import numpy as np

Window = tuple[int, int, int, int]  # left, top, right and bottom in pixels
OVERLAP = 0.25  # least overlap of neighboring windows, as a part of their side
# Windows raised AP where half of the objects were below 4 to 21 px (predictions.md).
SMALL = 16.0
SMALL_SHARE = 0.5
LARGE = 1.5  # times the size in training: smaller images have no more pixels to show
VISIBLE = 8.0  # a cell of the finest feature map of a DETR (stride 8)


def windows_of(width: int, height: int, side: int) -> list[Window]:
    """Return the fewest windows that cover an image, evenly spread over it.

    They are smaller than ``side`` only where the image is; it may be a single one.
    """
    spans = (
        [(start, min(start + side, length)) for start in starts(length, side)]
        for length in (height, width)
    )
    return [
        (left, top, right, bottom) for (top, bottom), (left, right) in product(*spans)
    ]


def starts(length: int, side: int) -> list[int]:
    """Return the first pixels of the windows along one side of an image."""
    gaps = math.ceil(max(length - side, 0) / max(side * (1 - OVERLAP), 1))
    return [round(i * (length - side) / gaps) for i in range(gaps + 1)] if gaps else [0]


class Advice(NamedTuple):
    """Whether a dataset needs windows.

    Args:
        tile: Side of the windows; None where whole images do.
        small: Number of boxes below `SMALL` pixels where whole images are resized.
        views: Number of windows of an image of median size.
    """

    tile: int | None
    reason: str
    small: int
    views: int = 1


def advice_for(
    box_N4: np.ndarray, size_N2: np.ndarray, scale: tuple[float, float]
) -> Advice:
    """Choose windows of half of an image if most boxes are small, and images large.

    They are halved again while half of the boxes stay below `VISIBLE` pixels, as long
    as a window is not enlarged.

    Args:
        box_N4: x, y, width and height of boxes in pixels.
        size_N2: Width and height of their images.
        scale: Of the ``Resize`` of the pipeline.
    """
    side_N = sides_in_training(box_N4, size_N2, scale)
    # Training leaves out boxes with a side below a pixel.
    used_N = np.isfinite(side_N) & (box_N4[:, 2:] >= 1).all(axis=1)
    boxes, small = int(used_N.sum()), int((side_N[used_N] < SMALL).sum())
    at = f"where images are scaled to {scale[0]:g} x {scale[1]:g}"
    reason = f"{small:,} of {boxes:,} boxes are below {SMALL:g} px {at}"
    if boxes == 0 or small < SMALL_SHARE * boxes:
        return Advice(None, reason, small)
    longest = np.median(size_N2[used_N].max(axis=1))
    if longest < LARGE * max(scale):
        return Advice(None, f"{reason}, but images have only {longest:g} px", small)
    parts = 2
    side = float(np.median(side_N[used_N]))
    while parts * side < VISIBLE and longest >= 2 * parts * max(scale):
        parts *= 2
    tile, (width, height) = round(longest / parts), np.median(size_N2[used_N], axis=0)
    views = len(windows_of(round(width), round(height), tile))
    return Advice(tile, reason, small, views)


def sides_in_training(
    box_N4: np.ndarray,
    size_N2: np.ndarray,
    scale: tuple[float, float],
    tile: int | None = None,
) -> np.ndarray:
    """Roots (N,) of the areas of boxes where images, or windows, are resized."""
    size_N2 = np.minimum(size_N2, np.inf if tile is None else tile)
    # As in mmcv, each side has its own bound.
    long_N, short_N = size_N2.max(axis=1), size_N2.min(axis=1)
    factor_N = np.minimum(max(scale) / long_N, min(scale) / short_N)
    return np.sqrt(box_N4[:, 2] * box_N4[:, 3]) * factor_N
