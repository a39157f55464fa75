"""A picture of the mixture: a row of annotated samples per dataset."""

from __future__ import annotations

import colorsys
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from damex.errors import DataError
from damex.toydata.domains import DATASETS
from damex.toydata.worlds import WORLDS

_ZOOM = 2
_TILE = 128 * _ZOOM
_GAP = 6
_MARGIN = 150
_INK = (30, 30, 30)
_NUM_COLORS = 256


def contact_sheet(
    root: Path, *, num_columns: int = 5, split: str = "train"
) -> Image.Image:
    """Draw samples of a generated mixture with boxes and class names."""
    root = Path(root)
    known = (*(spec.name for spec in DATASETS), *WORLDS)
    names = [name for name in known if (root / name).is_dir()]
    if not names:
        raise DataError(
            f"contact_sheet: no dataset of the toy mixture in {str(root)!r}; "
            f"make it with python -m damex.toydata --out {root}"
        )
    width = _MARGIN + num_columns * (_TILE + _GAP)
    sheet = Image.new("RGB", (width, len(names) * (_TILE + _GAP) + _GAP), "white")
    for row, name in enumerate(names):
        content = json.loads((root / name / f"{split}.json").read_text("utf-8"))
        y = _GAP + row * (_TILE + _GAP)
        _draw_title(sheet, y, name, content)
        for column, image in enumerate(_samples(content, num_columns)):
            tile = _tile(root / name / "images", image, content)
            x = _MARGIN + column * (_TILE + _GAP)
            left, top = (_TILE - tile.width) // 2, (_TILE - tile.height) // 2
            sheet.paste(tile, (x + left, y + top))
    return sheet.quantize(_NUM_COLORS, dither=Image.Dither.NONE)


def _samples(content: dict[str, Any], num: int) -> list[dict[str, Any]]:
    """Choose images with about four boxes each."""
    counts = Counter(annotation["image_id"] for annotation in content["annotations"])
    first = content["images"][: 4 * num]
    return sorted(first, key=lambda image: abs(counts[image["id"]] - 4))[:num]


def _draw_title(sheet: Image.Image, y: int, name: str, content: dict[str, Any]) -> None:
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, y), name, fill=_INK, font=ImageFont.load_default(24))
    counts = f"{len(content['images'])} images\n{len(content['annotations'])} boxes"
    draw.text((_GAP, y + 34), counts, fill=_INK, font=ImageFont.load_default(15))
    for index, category in enumerate(content["categories"]):
        column, line = divmod(index, 5)
        place = (_GAP + 70 * column, y + 84 + 20 * line)
        text, font = category["name"], ImageFont.load_default(15)
        draw.text(place, text, fill=_class_color(text, value=0.6), font=font)


def _tile(folder: Path, image: dict[str, Any], content: dict[str, Any]) -> Image.Image:
    with Image.open(folder / image["file_name"]) as picture:
        size = (picture.width * _ZOOM, picture.height * _ZOOM)
        tile = picture.convert("RGB").resize(size, Image.Resampling.NEAREST)
    names = {category["id"]: category["name"] for category in content["categories"]}
    draw = ImageDraw.Draw(tile)
    boxes = [a for a in content["annotations"] if a["image_id"] == image["id"]]
    for box in boxes:
        x, y, width, height = (value * _ZOOM for value in box["bbox"])
        color = _class_color(names[box["category_id"]], value=0.85)
        # One pixel outwards, so that the line surrounds the object.
        outline = (x - 1, y - 1, x + width, y + height)
        draw.rectangle(outline, outline=color, width=2)
    for box in boxes:
        _draw_label(draw, tile.size, box["bbox"], names[box["category_id"]])
    return tile


def _draw_label(
    draw: ImageDraw.ImageDraw, size: tuple[int, int], bbox: list[int], name: str
) -> None:
    """Write a name above the box, or below it at the top edge."""
    left, top, _, box_height = (value * _ZOOM for value in bbox)
    font = ImageFont.load_default(12)
    width, height = round(draw.textlength(name, font)) + 4, 14
    x = max(0, min(left - 1, size[0] - width))
    y = top - height - 1 if top > height else top + box_height
    color = _class_color(name, value=0.6)
    draw.rectangle((x, y, x + width, y + height), fill=color)
    draw.text((x + 2, y), name, fill="white", font=font)


def _class_color(name: str, *, value: float) -> tuple[int, int, int]:
    hue = zlib.crc32(name.encode()) % 360 / 360
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.9, value)
    return round(255 * red), round(255 * green), round(255 * blue)
