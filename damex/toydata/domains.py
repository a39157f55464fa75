"""The five datasets of the toy mixture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from damex.toydata import drawing
from damex.toydata.drawing import Canvas, Sprite, draw_random

SPLITS = ("train", "val")
ASSETS = Path(__file__).parent / "assets"  # their licences: data/README.md

Size = tuple[int, int]
Look = dict[str, Any]  # arguments of `draw_random`
Renderer = Callable[[Size, np.random.Generator], Canvas]

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TOKENS = ("shiny_disc", "framed_box", "split_wedge")
"""The drawings that `playroom` and `arcade` share under different names."""

_VAL_SHARE = 0.2  # of the handwritten digits
_NUM_STRIPS = 5  # of a photograph
_FAINT_SHARE = 0.15  # of the flat shapes
_WOOD = (0.72, 0.52, 0.33)
_MUTED: Look = dict(saturation=(0.3, 0.9), value=(0.45, 0.95))


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset of the mixture.

    Attributes:
        name: Folder name.
        classes: Class names in the order of their category ids, which start at 1.
        num_train: Number of training images.
        num_val: Number of validation images.
        build_renderer: Maps a split to a function that draws an image from (height,
            width) and a random generator.
        variant: Distinguishes datasets of the same name and size.
    """

    name: str
    classes: tuple[str, ...]
    num_train: int
    num_val: int
    build_renderer: Callable[[str], Renderer]
    variant: str = ""

    def num_images(self, split: str) -> int:
        """Return the number of images of a split, 'train' or 'val'."""
        return self.num_train if split == "train" else self.num_val


# ---- shapes: flat shapes on soft pastel fades, some of them hard to see ----


def _shapes(size_hw: Size, rng: np.random.Generator) -> Canvas:
    pastel: Look = dict(saturation=(0.05, 0.35), value=(0.6, 0.95))
    first, last = (drawing.random_color(rng, **pastel) for _ in range(2))
    angle = rng.uniform(0, 2 * np.pi)
    canvas = Canvas(drawing.gradient(size_hw, first, last, angle=angle))
    for _ in range(rng.integers(2, 7)):
        shape = ("stick", "cross")[rng.integers(2)]
        canvas.scatter(_shape(shape, rng, largest=40), rng, name=None)
    for _ in range(rng.integers(1, 8)):
        name = SHAPES.classes[rng.integers(len(SHAPES.classes))]
        canvas.scatter(_shape(name, rng, largest=60), rng, name=name)
    canvas.pixels += drawing.grain(size_hw, rng, sigma=0.02)
    return canvas


def _shape(shape: str, rng: np.random.Generator, *, largest: int) -> Sprite:
    faint = rng.uniform() < _FAINT_SHARE
    saturation = (0.15, 0.4) if faint else (0.5, 1.0)
    value = (0.55, 0.75) if faint else (0.35, 1.0)
    size = (26, largest)
    return draw_random(shape, rng, saturation=saturation, value=value, size=size)


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
    cut = round(num_digits * (1 - _VAL_SHARE))
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
            canvas.scatter(sprite, rng, name=WORDS[labels[index]])
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


def _digit(bitmap: np.ndarray, rng: np.random.Generator) -> Sprite:
    size = drawing.random_size(rng, 32, 56)
    bordered = np.pad(bitmap / 16 * 255, 1).astype(np.uint8)
    image = Image.fromarray(bordered).resize((size, size), Image.Resampling.BICUBIC)
    image = image.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    # Sharpen: the source counts ink per 4x4 cell, which blurs strokes.
    alpha = ((np.asarray(image) / 255 - 0.25) * 2.5).clip(0, 1)
    color = np.broadcast_to(np.array(_ink(rng)), (*alpha.shape, 3))
    return drawing.trim(Sprite(color=color, alpha=alpha))


# ---- photos: prints of stickers on two photographs ----


def load_photographs() -> dict[str, np.ndarray]:
    """Load the photographs `china` and `flower`, uint8 (427, 640, 3) in RGB."""
    photographs = {}
    for path in sorted(ASSETS.glob("*.jpg")):
        with Image.open(path) as image:
            photographs[path.stem] = np.asarray(image.convert("RGB"))
    return photographs


def source_columns(split: str, *, width: int) -> tuple[tuple[int, int], ...]:
    """Return the strips of a photograph for a split, as (first, end) columns.

    Strips alternate, so that both splits cover each scene and share no pixel.
    """
    edges = [round(width * strip / _NUM_STRIPS) for strip in range(_NUM_STRIPS + 1)]
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
            name = PHOTOS.classes[rng.integers(len(PHOTOS.classes))]
            canvas.scatter(_sticker(name, rng), rng, name=name)
        canvas.pixels += 0.12 * drawing.print_screen(size_hw, period=6.0)
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


def _sticker(name: str, rng: np.random.Generator) -> Sprite:
    smallest, turn = (30, 0.3) if name == "car" else (26, np.pi)
    look: Look = dict(saturation=(0.3, 1.0), value=(0.4, 1.0))
    sides, angles = (smallest, 60), (-turn, turn)
    sprite = draw_random(name, rng, **look, size=sides, angle=angles)
    # Slightly transparent, like a print.
    return Sprite(color=sprite.color, alpha=sprite.alpha * rng.uniform(0.75, 1.0))


# ---- playroom and arcade: toys on a wooden floor; the same on a dark screen ----


def draw_token(kind: int, rng: np.random.Generator) -> Sprite:
    """Draw an object that is alike in both worlds; only the background names it."""
    return draw_random(TOKENS[kind], rng, **_MUTED)


def _scatter_toys(
    canvas: Canvas,
    rng: np.random.Generator,
    *,
    tokens: tuple[str, ...],
    own: str,
    look: Look,
) -> Canvas:
    """Add sticks, shared drawings under their local names, and a drawing of its own."""
    for _ in range(rng.integers(1, 5)):
        stick = draw_random("stick", rng, **_MUTED, size=(26, 48), angle=(0, np.pi))
        canvas.scatter(stick, rng, name=None)
    for _ in range(rng.integers(1, 8)):
        kind = int(rng.integers(len(tokens) + 1))
        if kind < len(tokens):
            canvas.scatter(draw_token(kind, rng), rng, name=tokens[kind])
        else:
            canvas.scatter(draw_random(own, rng, **look), rng, name=own)
    canvas.pixels += drawing.grain(canvas.pixels.shape[:2], rng, sigma=0.015)
    return canvas


def _playroom(size_hw: Size, rng: np.random.Generator) -> Canvas:
    floor = drawing.flat(size_hw, drawing.shade(_WOOD, rng.uniform(0.75, 1.2)))
    plank = int(rng.integers(16, 32))
    for start in range(-int(rng.integers(plank)), size_hw[1], plank):
        floor[:, max(start, 0) : start + plank] *= rng.uniform(0.85, 1.12)
        floor[:, max(start, 0) : max(start + 1, 0)] *= 0.6
    # Tall, narrow blobs look like wood grain.
    floor = floor * (1 + 0.1 * drawing.clouds(size_hw, rng, cells_hw=(4, 48)))
    look: Look = dict(size=(30, 60), angle=(-0.3, 0.3))
    tokens = ("ball", "crate", "roof")
    return _scatter_toys(Canvas(floor), rng, tokens=tokens, own="car", look=look)


def _arcade(size_hw: Size, rng: np.random.Generator) -> Canvas:
    color = drawing.random_color(rng, saturation=(0.5, 0.9), value=(0.08, 0.2))
    screen = drawing.flat(size_hw, color)
    spacing = int(rng.integers(8, 20))
    line = drawing.random_color(rng, saturation=(0.5, 1.0), value=(0.2, 0.35))
    screen[int(rng.integers(spacing)) :: spacing] = line
    screen[:, int(rng.integers(spacing)) :: spacing] = line
    screen[::2] *= 0.8
    look: Look = dict(value=(0.7, 1.0))
    tokens = ("coin", "chip", "ship")
    return _scatter_toys(Canvas(screen), rng, tokens=tokens, own="star", look=look)


# Synthetic datasets have the same renderer in both splits.
SHAPES = DatasetSpec(
    "shapes",
    ("star", "square", "circle", "ring", "triangle"),
    900,
    60,
    lambda _: _shapes,
)
PHOTOS = DatasetSpec(
    "photos", ("leaf", "circle", "car", "kite"), 250, 60, _photos_renderer
)
DATASETS = (
    SHAPES,
    DatasetSpec(
        "digits",
        tuple(WORDS[number] for number in (3, 0, 8, 1, 9, 5, 2, 7, 4, 6)),
        500,
        60,
        _digits_renderer,
    ),
    PHOTOS,
    DatasetSpec(
        "playroom", ("crate", "roof", "ball", "car"), 120, 60, lambda _: _playroom
    ),
    DatasetSpec("arcade", ("ship", "coin", "chip", "star"), 60, 60, lambda _: _arcade),
)
