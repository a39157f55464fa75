"""Boxes with labels in an image, for every command that draws. Imports no torch."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

LINE, TEXT = 200, 60  # an image's longer side over the width of lines, height of text
ANGLE = 0.61803399  # the golden angle: consecutive classes get distant colors

Color = tuple[int, int, int]


def palette(names: Iterable[str]) -> dict[str, Color]:
    """A distinct color for each class, dark enough for white text."""
    colors = {}
    for number, name in enumerate(names):
        hue, value = number * ANGLE % 1, (0.75, 0.55)[number // 8 % 2]
        red, green, blue = colorsys.hsv_to_rgb(hue, 0.95, value)
        colors[name] = round(255 * red), round(255 * green), round(255 * blue)
    return colors


def draw_boxes(
    image_HWC: np.ndarray,
    boxes_N4: np.ndarray | Sequence[Sequence[float]],
    labels: Sequence[str],
    colors: Sequence[Color] | None = None,
) -> np.ndarray:
    """Return a copy of an image with boxes, the first ones on top.

    Args:
        image_HWC: uint8 RGB.
        boxes_N4: Corners x1, y1, x2, y2 in pixels.
        labels: Text at each box; empty for none.
        colors: RGB of each box; by default from the `palette` of the labels.
    """
    image = Image.fromarray(np.ascontiguousarray(image_HWC))
    if colors is None:
        known = palette(dict.fromkeys(labels))
        colors = [known[label] for label in labels]
    longer = max(image.size)
    pen, width = ImageDraw.Draw(image), max(longer // LINE, 2)
    font = ImageFont.load_default(max(longer // TEXT, 12))
    corners = np.asarray(boxes_N4, float).reshape(-1, 4).tolist()
    rows = [*zip(corners, labels, colors, strict=True)][::-1]
    for corner, _, color in rows:
        pen.rectangle(corner, outline=color, width=width)
    height = math.ceil(font.getbbox("Ag")[3])
    for (left, top, _, _), label, color in rows:
        label = " ".join(label.split())  # a line break has no length
        if label:
            wide = math.ceil(pen.textlength(label, font)) + 4
            left = max(0.0, min(left, image.width - wide))
            top = top - height if top >= height else top
            top = max(0.0, min(top, image.height - height))
            pen.rectangle((left, top, left + wide, top + height), fill=color)
            pen.text((left + 2, top), label, fill="white", font=font)
    return np.asarray(image)
