"""Pictures of samples with their boxes: tiles and contact sheets."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont, ImageOps

from damex.curation.views import Sample
from damex.datasets.formats.images import ROTATED_WHEN_LOADED, images_of_any_size

TILE = 400
COLUMNS = 4
# Only the largest boxes get names, as more would hide the image.
MAX_NAMES = 12
_GAP = 8
_TITLE = 40
_CAPTION = 18
_PAPER, _INK = (250, 250, 248), (30, 30, 30)


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


def draw_tile(sample: Sample, colors: Mapping[str, Color]) -> Image.Image:
    """An image as training loads it, with the boxes of its file.

    Boxes are not rescaled to the stated image size: if that is wrong, they are
    misplaced here as in training.
    """
    try:
        with images_of_any_size(), Image.open(sample.path) as opened:
            applies = sample.applies_exif and opened.format in ROTATED_WHEN_LOADED
            turned = ImageOps.exif_transpose(opened) if applies else opened
            image = turned.convert("RGB")
    except Exception as error:  # PIL's readers raise anything
        return _broken(error)
    scale = TILE / max(image.size)
    size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
    tile = image.resize(size, Image.Resampling.LANCZOS)
    draw = ImageDraw.Draw(tile)
    boxes = sorted(sample.boxes, key=lambda box: -abs(box[1][2] * box[1][3]))
    corners = [_scaled(box, scale) for _, box in boxes]
    for (name, _), (left, top, right, bottom) in zip(boxes, corners, strict=True):
        color = colors.get(name, _INK)
        draw.rectangle((left, top, right, bottom), outline=color, width=2)
    for (name, _), corner in zip(boxes[:MAX_NAMES], corners, strict=False):
        draw_name(
            *(draw, tile.size, corner, name, colors.get(name, _INK)),
            ImageFont.load_default(12),
        )
    return tile


def contact_sheet(
    title: str, samples: Sequence[tuple[str, Image.Image]]
) -> Image.Image:
    """Rows of captioned tiles below a title."""
    columns = min(COLUMNS, max(len(samples), 1))
    starts = range(0, len(samples), columns)
    rows = [samples[start : start + columns] for start in starts]
    heights = [max(tile.height for _, tile in row) + _CAPTION for row in rows]
    width = columns * (TILE + _GAP) + _GAP
    sheet = Image.new("RGB", (width, sum(heights) + _GAP * len(rows) + _TITLE), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text(
        (_GAP, 8), " ".join(title.split()), fill=_INK, font=ImageFont.load_default(20)
    )
    top = _TITLE
    for row, height in zip(rows, heights, strict=True):
        for column, (caption, tile) in enumerate(row):
            left = _GAP + column * (TILE + _GAP)
            sheet.paste(tile, (left, top))
            place = (left, top + tile.height + 2)
            font = ImageFont.load_default(12)
            draw.text(place, _cut(caption, font), fill=_INK, font=font)
        top += height + _GAP
    return sheet


def _scaled(
    box: tuple[float, float, float, float], scale: float
) -> tuple[float, float, float, float]:
    """Corners of a box in a tile, sorted even for negative sides."""
    x, y, w, h = (value * scale for value in box)
    return min(x, x + w), min(y, y + h), max(x, x + w), max(y, y + h)


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


def _cut(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """A line of text, shortened at its start to fit a tile."""
    text = " ".join(text.split())
    while font.getlength(text) > TILE and len(text) > 4:
        text = "..." + text[4:]
    return text


def _broken(error: Exception) -> Image.Image:
    tile = Image.new("RGB", (TILE, TILE // 2), (225, 225, 220))
    text = f"cannot be opened:\n{type(error).__name__}"
    ImageDraw.Draw(tile).text(
        (12, 12), text, fill=_INK, font=ImageFont.load_default(16)
    )
    return tile
