"""``python -m damex.toydata``: generate the toy mixture, and draw samples of it."""

from __future__ import annotations

import colorsys
import json
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from PIL import Image, ImageDraw, ImageFont

from damex.commandline.run import parameter, program, run_command
from damex.errors import ConfigError, DataError
from damex.toydata import generate_toy_mixture
from damex.toydata.domains import DATASETS, WORLDS, Names, world_specs

# Of the contact sheet, in pixels.
_ZOOM = 2
_TILE = 128 * _ZOOM
_GAP = 6
_MARGIN = 150

app = program(
    "python -m damex.toydata",
    "Generate the toy mixture of five small detection datasets.",
    "python -m damex.toydata --out data/toy",
    "python -m damex.toydata --out data/worlds --worlds 4",
)


@app.default
def toydata(
    *,
    out: Path = Path("data/toy"),
    seed: int = 0,
    worlds: int | None = None,
    names: Names | None = None,
    train: int | None = None,
    val: int | None = None,
    force: bool = False,
    sheet: Annotated[Path | None, parameter("PNG")] = None,
) -> None:
    """Generate the mixture and print its sizes.

    Args:
        out: Output folder.
        seed: Another one gives other images.
        worlds: Instead: so many worlds that share their objects (1 to 8).
        names: Whether the worlds agree in the names of objects.
        train: Training images of each world.
        val: Validation images of each world.
        force: Replace an earlier mixture; other files in the folder stay.
        sheet: Also write a picture of samples.
    """
    options: dict[str, Any] = dict(names=names, num_train=train, num_val=val)
    given = {key: value for key, value in options.items() if value is not None}
    if given and worlds is None:
        raise ConfigError("--names, --train and --val are for --worlds; set it, too.")
    specs = DATASETS if worlds is None else world_specs(worlds, **given)
    report = generate_toy_mixture(out, seed=seed, force=force, specs=specs)
    print(f"{out}\n{report.table()}")
    if sheet is not None:
        contact_sheet(out).save(sheet, optimize=True)


def contact_sheet(root: Path, *, num_columns: int = 5) -> Image.Image:
    """Draw samples of a generated mixture with boxes and class names."""
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
        content = json.loads((root / name / "train.json").read_text("utf-8"))
        y = _GAP + row * (_TILE + _GAP)
        _draw_title(sheet, y, name, content)
        # Images with about four boxes each.
        counts = Counter(one["image_id"] for one in content["annotations"])
        images = content["images"][: 4 * num_columns]
        images.sort(key=lambda image: abs(counts[image["id"]] - 4))
        for column, image in enumerate(images[:num_columns]):
            tile = _tile(root / name / "images", image, content)
            x = _MARGIN + column * (_TILE + _GAP)
            left, top = (_TILE - tile.width) // 2, (_TILE - tile.height) // 2
            sheet.paste(tile, (x + left, y + top))
    return sheet.quantize(256, dither=Image.Dither.NONE)


def _draw_title(sheet: Image.Image, y: int, name: str, content: dict[str, Any]) -> None:
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    gray = (30, 30, 30)
    draw.text((_GAP, y), name, fill=gray, font=ImageFont.load_default(24))
    counts = f"{len(content['images'])} images\n{len(content['annotations'])} boxes"
    draw.text((_GAP, y + 34), counts, fill=gray, font=font)
    for index, category in enumerate(content["categories"]):
        column, line = divmod(index, 5)
        place, text = (_GAP + 70 * column, y + 84 + 20 * line), category["name"]
        draw.text(place, text, fill=_class_color(text, value=0.6), font=font)


def _tile(folder: Path, image: dict[str, Any], content: dict[str, Any]) -> Image.Image:
    """Enlarge an image and draw its boxes, with names above, or below."""
    with Image.open(folder / image["file_name"]) as picture:
        size = (picture.width * _ZOOM, picture.height * _ZOOM)
        tile = picture.convert("RGB").resize(size, Image.Resampling.NEAREST)
    names = {category["id"]: category["name"] for category in content["categories"]}
    draw, font = ImageDraw.Draw(tile), ImageFont.load_default(12)
    boxes = [
        (names[one["category_id"]], *(value * _ZOOM for value in one["bbox"]))
        for one in content["annotations"]
        if one["image_id"] == image["id"]
    ]
    for name, x, y, width, height in boxes:
        # One pixel outwards, so that the line surrounds the object.
        outline = (x - 1, y - 1, x + width, y + height)
        draw.rectangle(outline, outline=_class_color(name, value=0.85), width=2)
    for name, x, y, _, height in boxes:
        wide, high = round(draw.textlength(name, font)) + 4, 14
        left = max(0, min(x - 1, tile.width - wide))
        top = y - high - 1 if y > high else y + height
        color = _class_color(name, value=0.6)
        draw.rectangle((left, top, left + wide, top + high), fill=color)
        draw.text((left + 2, top), name, fill="white", font=font)
    return tile


def _class_color(name: str, *, value: float) -> tuple[int, int, int]:
    hue = zlib.crc32(name.encode()) % 360 / 360
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.9, value)
    return round(255 * red), round(255 * green), round(255 * blue)


if __name__ == "__main__":
    sys.exit(run_command(app))
