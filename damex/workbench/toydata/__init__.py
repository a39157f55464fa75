"""The toy mixture: five small detection datasets, generated in seconds.

For trying and testing training on several datasets at once: no download, about 6 MB,
128 px, and a tiny DETR learns a part of it in minutes on a CPU.

    damex toydata --out data/toy

| dataset  | train/val | appearance                               | classes           |
|----------|-----------|------------------------------------------|-------------------|
| shapes   | 900/60    | flat shapes on noisy pastel fades        | star, square, ... |
| digits   | 500/60    | handwritten digits (real) on ruled paper | zero ... nine     |
| photos   | 250/60    | stickers on printed photographs (real)   | leaf, circle, ... |
| playroom | 120/60    | toys on a wooden floor                   | ball, crate, ...  |
| arcade   | 60/60     | a dark screen with a grid                | coin, chip, ...   |

Like real mixtures, datasets differ in looks and size, names overlap under different
ids, and `playroom` and `arcade` draw three objects alike and name them differently.
data/README.md explains the choices. Difficulty was set by short trainings of the quick
start; no choice compared methods.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from damex.files import atomic_folder, check_free
from damex.workbench.toydata import drawing
from damex.workbench.toydata.drawing import Canvas, draw_random

VERSION = "1.3"

_LICENSE = "Apache-2.0; digits: CC BY 4.0; photographs: CC BY 2.0 (see data/README.md)"
# Mostly square; the others make batches need padding.
_SIZES_HW = ((128, 128), (128, 128), (128, 128), (96, 128), (128, 96))

SPLITS = ("train", "val")
ASSETS = Path(__file__).parent / "assets"  # their licences: data/README.md

Size = tuple[int, int]
Look = dict[str, Any]  # arguments of `draw_random`
Renderer = Callable[[str, Size, np.random.Generator], Canvas]  # str: the split

DIGITS = (
    *("zero", "one", "two", "three", "four"),
    *("five", "six", "seven", "eight", "nine"),
)
_MUTED: Look = dict(saturation=(0.3, 0.9), value=(0.45, 0.95))
# Name, shape and look: both datasets draw the same three, under different names.
TOYS: Sequence[tuple[str, str, Look]] = (
    ("ball", "shiny_disc", _MUTED),
    ("crate", "framed_box", _MUTED),
    ("roof", "split_wedge", _MUTED),
    ("car", "car", dict(size=(30, 60), angle=(-0.3, 0.3))),
)
ICONS: Sequence[tuple[str, str, Look]] = (
    ("coin", "shiny_disc", _MUTED),
    ("chip", "framed_box", _MUTED),
    ("ship", "split_wedge", _MUTED),
    ("star", "star", dict(value=(0.7, 1.0))),
)


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset of the mixture: a folder `name` with so many images."""

    name: str
    classes: tuple[str, ...]  # in the order of their category ids, which start at 1
    num_train: int
    num_val: int
    draw: Renderer  # an image of a split, of (height, width)


# ---- shapes: flat shapes on soft pastel fades, some of them hard to see ----


def _shapes(split: str, size_hw: Size, rng: np.random.Generator) -> Canvas:
    pastel: Look = dict(saturation=(0.05, 0.35), value=(0.6, 0.95))
    first, last = (drawing.random_color(rng, **pastel) for _ in range(2))
    angle = rng.uniform(0, 2 * np.pi)
    rows, columns = np.mgrid[: size_hw[0], : size_hw[1]]
    along = columns * np.cos(angle) + rows * np.sin(angle)
    along = ((along - along.min()) / np.ptp(along))[:, :, None]
    canvas = Canvas(np.array(first) * (1 - along) + np.array(last) * along)
    for _ in range(rng.integers(2, 7)):
        shape = ("stick", "cross")[rng.integers(2)]
        canvas.scatter(_shape(shape, rng, largest=40), rng, name=None)
    for _ in range(rng.integers(1, 8)):
        name = _SHAPES[rng.integers(len(_SHAPES))]
        canvas.scatter(_shape(name, rng, largest=60), rng, name=name)
    canvas.pixels += drawing.grain(size_hw, rng, sigma=0.02)
    return canvas


def _shape(shape: str, rng: np.random.Generator, *, largest: int) -> np.ndarray:
    look: Look = dict(saturation=(0.5, 1.0), value=(0.35, 1.0))
    if rng.uniform() < 0.15:  # hard to see
        look = dict(saturation=(0.15, 0.4), value=(0.55, 0.75))
    return draw_random(shape, rng, size=(26, largest), **look)


# ---- digits: real handwritten digits on ruled paper ----


@cache
def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Load UCI's handwritten digits: ink from 0 to 16, (1797, 8, 8), and labels."""
    with np.load(ASSETS / "digits.npz") as digits:
        return digits["images"].astype(np.float64), digits["labels"].astype(np.int64)


def source_indices(split: str) -> range:
    """Return the rows of `load_digits` for a split.

    The file is ordered by writer, so a single cut keeps most writers of the last part
    unseen.
    """
    num_digits = len(load_digits()[1])
    cut = round(num_digits * 0.8)
    return range(cut) if split == "train" else range(cut, num_digits)


def _digits(split: str, size_hw: Size, rng: np.random.Generator) -> Canvas:
    bitmaps, labels = load_digits()
    rows = source_indices(split)
    canvas = Canvas(_ruled_paper(size_hw, rng))
    for _ in range(rng.integers(0, 4)):
        look: Look = dict(color=_ink(rng), size=(26, 44), angle=(0, np.pi))
        canvas.scatter(draw_random("stick", rng, **look), rng, name=None)
    for _ in range(rng.integers(1, 8)):
        row = rows[rng.integers(len(rows))]
        canvas.scatter(_digit(bitmaps[row], rng), rng, name=DIGITS[labels[row]])
    canvas.pixels += drawing.grain(size_hw, rng, sigma=0.015)
    return canvas


def _ruled_paper(size_hw: Size, rng: np.random.Generator) -> np.ndarray:
    tone = rng.uniform(0.78, 0.97)
    paper = np.full((*size_hw, 3), (tone, tone, tone * 0.97))
    spacing = int(rng.integers(10, 20))
    paper[int(rng.integers(spacing)) :: spacing] *= (0.8, 0.88, 0.97)
    return paper + 0.04 * drawing.clouds(size_hw, rng, cells_hw=(3, 3))


def _ink(rng: np.random.Generator) -> drawing.Color:
    tone = rng.uniform(0.05, 0.35)
    return tone, tone, min(1.0, tone + rng.uniform(0, 0.25))


def _digit(bitmap: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    size = drawing.random_size(rng, 32, 56)
    bordered = np.pad(bitmap / 16 * 255, 1).astype(np.uint8)
    image = Image.fromarray(bordered).resize((size, size), Image.Resampling.BICUBIC)
    image = image.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    # Sharpen: the source counts ink per 4x4 cell, which blurs strokes.
    alpha = ((np.asarray(image) / 255 - 0.25) * 2.5).clip(0, 1)
    return drawing.trim(np.dstack([np.full((*alpha.shape, 3), _ink(rng)), alpha]))


# ---- photos: prints of stickers on two photographs ----


@cache
def load_photographs() -> dict[str, np.ndarray]:
    """Load the photographs `china` and `flower`, uint8 (427, 640, 3) in RGB."""
    paths = sorted(ASSETS.glob("*.jpg"))
    return {path.stem: np.asarray(Image.open(path).convert("RGB")) for path in paths}


def source_columns(split: str, *, width: int) -> tuple[tuple[int, int], ...]:
    """Return the strips of a photograph for a split, as (first, end) columns.

    Strips alternate, so that both splits cover each scene and share no pixel.
    """
    edges = [round(width * strip / 5) for strip in range(6)]
    strips = tuple(pairwise(edges))
    return strips[0::2] if split == "train" else strips[1::2]


def _photos(split: str, size_hw: Size, rng: np.random.Generator) -> Canvas:
    strips = [
        photo[:, first:end]
        for photo in load_photographs().values()
        for first, end in source_columns(split, width=photo.shape[1])
    ]
    canvas = Canvas(_crop(strips[rng.integers(len(strips))], size_hw, rng))
    for _ in range(rng.integers(1, 7)):
        name = _STICKERS[rng.integers(len(_STICKERS))]
        canvas.scatter(_sticker(name, rng), rng, name=name)
    # The dots of a printed photograph, 6 pixels apart along a diagonal.
    rows, columns = np.mgrid[: size_hw[0], : size_hw[1]]
    falling = np.cos(2 * np.pi * (columns + rows) / 6.0)
    rising = np.cos(2 * np.pi * (columns - rows) / 6.0)
    canvas.pixels += 0.12 * ((falling + rising) / 2)[:, :, None]
    return canvas


def _crop(photo: np.ndarray, size_hw: Size, rng: np.random.Generator) -> np.ndarray:
    zoom = rng.uniform(0.7, 1.0)
    height, width = (round(side * zoom) for side in size_hw)
    y = int(rng.integers(photo.shape[0] - height + 1))
    x = int(rng.integers(photo.shape[1] - width + 1))
    part = Image.fromarray(photo[y : y + height, x : x + width])
    if rng.uniform() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    part = part.resize(size_hw[::-1], Image.Resampling.BICUBIC)
    return np.asarray(part, dtype=np.float64) / 255 * rng.uniform(0.65, 0.95)


def _sticker(name: str, rng: np.random.Generator) -> np.ndarray:
    smallest, turn = (30, 0.3) if name == "car" else (26, np.pi)
    look: Look = dict(saturation=(0.3, 1.0), value=(0.4, 1.0))
    sides, angles = (smallest, 60), (-turn, turn)
    sprite = draw_random(name, rng, **look, size=sides, angle=angles)
    sprite[:, :, 3] *= rng.uniform(0.75, 1.0)  # slightly transparent, like a print
    return sprite


# ---- playroom and arcade: toys on a wooden floor; the same on a dark screen ----


def _scatter_toys(
    canvas: Canvas, rng: np.random.Generator, toys: Sequence[tuple[str, str, Look]]
) -> Canvas:
    for _ in range(rng.integers(1, 5)):
        stick = draw_random("stick", rng, **_MUTED, size=(26, 48), angle=(0, np.pi))
        canvas.scatter(stick, rng, name=None)
    for _ in range(rng.integers(1, 8)):
        name, shape, look = toys[int(rng.integers(len(toys)))]
        canvas.scatter(draw_random(shape, rng, **look), rng, name=name)
    canvas.pixels += drawing.grain(canvas.pixels.shape[:2], rng, sigma=0.015)
    return canvas


def _playroom(split: str, size_hw: Size, rng: np.random.Generator) -> Canvas:
    wood = drawing.shade((0.72, 0.52, 0.33), rng.uniform(0.75, 1.2))
    floor: np.ndarray = np.full((*size_hw, 3), wood)
    plank = int(rng.integers(16, 32))
    for start in range(-int(rng.integers(plank)), size_hw[1], plank):
        floor[:, max(start, 0) : start + plank] *= rng.uniform(0.85, 1.12)
        floor[:, max(start, 0) : max(start + 1, 0)] *= 0.6
    # Tall, narrow blobs look like wood grain.
    floor = floor * (1 + 0.1 * drawing.clouds(size_hw, rng, cells_hw=(4, 48)))
    return _scatter_toys(Canvas(floor), rng, TOYS)


def _arcade(split: str, size_hw: Size, rng: np.random.Generator) -> Canvas:
    color = drawing.random_color(rng, saturation=(0.5, 0.9), value=(0.08, 0.2))
    screen = np.full((*size_hw, 3), color)
    spacing = int(rng.integers(8, 20))
    line = drawing.random_color(rng, saturation=(0.5, 1.0), value=(0.2, 0.35))
    screen[int(rng.integers(spacing)) :: spacing] = line
    screen[:, int(rng.integers(spacing)) :: spacing] = line
    screen[::2] *= 0.8
    return _scatter_toys(Canvas(screen), rng, ICONS)


_SHAPES = ("star", "square", "circle", "ring", "triangle")
_STICKERS = ("leaf", "circle", "car", "kite")
_NUMBERS = tuple(DIGITS[number] for number in (3, 0, 8, 1, 9, 5, 2, 7, 4, 6))
_TOYS, _ICONS = ("crate", "roof", "ball", "car"), ("ship", "coin", "chip", "star")
DATASETS = (
    DatasetSpec("shapes", _SHAPES, 900, 60, _shapes),
    DatasetSpec("digits", _NUMBERS, 500, 60, _digits),
    DatasetSpec("photos", _STICKERS, 250, 60, _photos),
    DatasetSpec("playroom", _TOYS, 120, 60, _playroom),
    DatasetSpec("arcade", _ICONS, 60, 60, _arcade),
)


def toydata(*, out: Path, seed: int) -> None:
    """``damex toydata``: generate the mixture in a new folder, and print its sizes."""
    if holds_toy_mixture(out, seed=seed):
        print(f"{out} holds the toy mixture already; to make it again, delete {out}.")
        return
    boxes = generate_toy_mixture(out, seed=seed)
    print(f"{out}\n{'dataset':<10}{'images train/val':>18}{'boxes':>14}  classes")
    for spec in DATASETS:
        images = f"{spec.num_train}/{spec.num_val}"
        found = "/".join(map(str, boxes[spec.name]))
        print(f"{spec.name:<10}{images:>18}{found:>14}  {', '.join(spec.classes)}")


def generate_toy_mixture(
    out: Path, *, seed: int = 0, specs: Sequence[DatasetSpec] = DATASETS
) -> dict[str, list[int]]:
    """Generate the toy mixture in a new or empty folder; return its numbers of boxes.

    Equal arguments give equal files (with the same Pillow and NumPy). The folder
    appears when it is complete. ConfigError if `out` is taken or cannot be written.
    """
    check_free(out)
    boxes = {}
    with atomic_folder(out) as made:
        for spec in specs:
            (made / spec.name / "images").mkdir(parents=True)
            boxes[spec.name] = [
                _write_split(made, spec, split, seed) for split in SPLITS
            ]
    return boxes


def holds_toy_mixture(out: Path, *, seed: int = 0) -> bool:
    """Return whether a folder has all datasets of this version and seed."""
    try:
        return all(
            json.loads((out / spec.name / f"{split}.json").read_text("utf-8"))["info"]
            == _info(spec, split, seed)
            for spec in DATASETS
            for split in SPLITS
        )
    except (OSError, ValueError, TypeError, KeyError):
        return False


def render_image(spec: DatasetSpec, split: str, index: int, *, seed: int) -> Canvas:
    """Render an image with at least one object.

    The random generator depends on (seed, dataset, split, index) only, so an image does
    not change with the number or the order of the others.
    """
    key = [seed, zlib.crc32(spec.name.encode()), SPLITS.index(split), index]
    rng = np.random.default_rng(key)
    size_hw = _SIZES_HW[rng.integers(len(_SIZES_HW))]
    return spec.draw(split, size_hw, rng)


def _write_split(root: Path, spec: DatasetSpec, split: str, seed: int) -> int:
    """Write the images and the COCO json of a split; return the number of boxes."""
    folder = root / spec.name
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(spec.num_train if split == "train" else spec.num_val):
        canvas = render_image(spec, split, index, seed=seed)
        picture, name = canvas.image(), f"{split}_{index:05d}.jpg"
        picture.save(folder / "images" / name, quality=60, optimize=True)
        size = {"width": picture.width, "height": picture.height}
        images.append({"id": index + 1, "file_name": name, **size})
        annotations += [
            {
                "id": number,
                "image_id": index + 1,
                "category_id": spec.classes.index(box.name) + 1,
                "bbox": box[1:],
                "area": box.width * box.height,
                "iscrowd": 0,
            }
            for number, box in enumerate(canvas.boxes(), len(annotations) + 1)
        ]
    names = enumerate(spec.classes, start=1)
    content = {
        "info": _info(spec, split, seed),
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in names],
    }
    text = json.dumps(content, separators=(",", ":")) + "\n"
    (folder / f"{split}.json").write_text(text, encoding="utf-8")
    return len(annotations)


def _info(spec: DatasetSpec, split: str, seed: int) -> dict[str, Any]:
    return {
        "description": f"damex toy mixture: {spec.name}, {split}",
        "version": VERSION,
        "seed": seed,
        "license": _LICENSE,
    }
