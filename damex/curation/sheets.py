"""Colors of classes, and names of boxes in a picture."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable

from PIL import ImageDraw, ImageFont

# The golden angle: consecutive classes get distant colors.
_ANGLE = 0.61803399

Color = tuple[int, int, int]


def palette(names: Iterable[str]) -> dict[str, Color]:
    """A distinct color for each class, dark enough for white text."""
    colors = {}
    for number, name in enumerate(names):
        hue, value = number * _ANGLE % 1, (0.75, 0.55)[number // 8 % 2]
        red, green, blue = colorsys.hsv_to_rgb(hue, 0.95, value)
        colors[name] = round(255 * red), round(255 * green), round(255 * blue)
    return colors


def draw_name(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    corner: tuple[float, float, float, float],
    name: str,
    color: Color,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
) -> None:
    """Write the name of a box (left, top, right, bottom) above it, if possible.

    ``size`` is the width and height of the image.
    """
    name = " ".join(name.split())  # a line break has no length
    width = math.ceil(draw.textlength(name, font)) + 4
    height = math.ceil(font.getbbox("Ag")[3])
    left, top = corner[0], corner[1] - height
    left = max(0.0, min(left, size[0] - width))
    top = max(0.0, min(top if top >= 0 else corner[1], size[1] - height))
    draw.rectangle((left, top, left + width, top + height), fill=color)
    draw.text((left + 2, top), name, fill="white", font=font)
