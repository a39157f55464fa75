"""The five datasets of the toy mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from damex.workbench.toydata import drawing
from damex.workbench.toydata.drawing import Canvas, draw_random

SPLITS = ("train", "val")
ASSETS = Path(__file__).parent / "assets"  # their licences: data/README.md

Size = tuple[int, int]
Look = dict[str, Any]  # arguments of `draw_random`
Renderer = Callable[[Size, np.random.Generator], Canvas]

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
    """One dataset of the mixture: a folder `name` with so many images.

    Attributes:
        classes: Class names in the order of their category ids, which start at 1.
        build_renderer: Maps a split to a function that draws an image from (height,
            width) and a random generator.
    """

    name: str
    classes: tuple[str, ...]
    num_train: int
    num_val: int
    build_renderer: Callable[[str], Renderer]


# ---- shapes: flat shapes on soft pastel fades, some of them hard to see ----


def _shapes(size_hw: Size, rng: np.random.Generator) -> Canvas:
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


def _digits_renderer(split: str) -> Renderer:
    images, digits = load_digits()
    rows = source_indices(split)
    bitmaps, labels = images[rows], digits[rows]

    def render(size_hw: Size, rng: np.random.Generator) -> Canvas:
        canvas = Canvas(_ruled_paper(size_hw, rng))
        for _ in range(rng.integers(0, 4)):
            look: Look = dict(color=_ink(rng), size=(26, 44), angle=(0, np.pi))
            canvas.scatter(draw_random("stick", rng, **look), rng, name=None)
        for _ in range(rng.integers(1, 8)):
            index = rng.integers(len(labels))
            sprite = _digit(bitmaps[index], rng)
            canvas.scatter(sprite, rng, name=DIGITS[labels[index]])
        canvas.pixels += drawing.grain(size_hw, rng, sigma=0.015)
        return canvas

    return render


def _ruled_paper(size_hw: Size, rng: np.random.Generator) -> np.ndarray:
    tone = rng.uniform(0.78, 0.97)
    paper = drawing.flat(size_hw, (tone, tone, tone * 0.97))
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
    return drawing.trim(np.dstack([drawing.flat(alpha.shape, _ink(rng)), alpha]))


# ---- photos: prints of stickers on two photographs ----


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


def _photos_renderer(split: str) -> Renderer:
    strips = [
        photo[:, first:end]
        for photo in load_photographs().values()
        for first, end in source_columns(split, width=photo.shape[1])
    ]

    def render(size_hw: Size, rng: np.random.Generator) -> Canvas:
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

    return render


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


def _playroom(size_hw: Size, rng: np.random.Generator) -> Canvas:
    wood = drawing.shade((0.72, 0.52, 0.33), rng.uniform(0.75, 1.2))
    floor = drawing.flat(size_hw, wood)
    plank = int(rng.integers(16, 32))
    for start in range(-int(rng.integers(plank)), size_hw[1], plank):
        floor[:, max(start, 0) : start + plank] *= rng.uniform(0.85, 1.12)
        floor[:, max(start, 0) : max(start + 1, 0)] *= 0.6
    # Tall, narrow blobs look like wood grain.
    floor = floor * (1 + 0.1 * drawing.clouds(size_hw, rng, cells_hw=(4, 48)))
    return _scatter_toys(Canvas(floor), rng, TOYS)


def _arcade(size_hw: Size, rng: np.random.Generator) -> Canvas:
    color = drawing.random_color(rng, saturation=(0.5, 0.9), value=(0.08, 0.2))
    screen = drawing.flat(size_hw, color)
    spacing = int(rng.integers(8, 20))
    line = drawing.random_color(rng, saturation=(0.5, 1.0), value=(0.2, 0.35))
    screen[int(rng.integers(spacing)) :: spacing] = line
    screen[:, int(rng.integers(spacing)) :: spacing] = line
    screen[::2] *= 0.8
    return _scatter_toys(Canvas(screen), rng, ICONS)


def in_both_splits(renderer: Renderer) -> Callable[[str], Renderer]:
    """Draw the images of both splits alike."""
    return lambda split: renderer


_SHAPES = ("star", "square", "circle", "ring", "triangle")
_STICKERS = ("leaf", "circle", "car", "kite")
_NUMBERS = tuple(DIGITS[number] for number in (3, 0, 8, 1, 9, 5, 2, 7, 4, 6))
_TOYS, _ICONS = ("crate", "roof", "ball", "car"), ("ship", "coin", "chip", "star")
DATASETS = (
    DatasetSpec("shapes", _SHAPES, 900, 60, in_both_splits(_shapes)),
    DatasetSpec("digits", _NUMBERS, 500, 60, _digits_renderer),
    DatasetSpec("photos", _STICKERS, 250, 60, _photos_renderer),
    DatasetSpec("playroom", _TOYS, 120, 60, in_both_splits(_playroom)),
    DatasetSpec("arcade", _ICONS, 60, 60, in_both_splits(_arcade)),
)
