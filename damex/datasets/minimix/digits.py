"""`digits`: real handwritten digits of scikit-learn on ruled paper."""

from __future__ import annotations

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from damex.datasets.minimix import sprites, textures
from damex.datasets.minimix.canvas import Canvas, Sprite
from damex.datasets.minimix.spec import Renderer

CLASSES = (
    "three",
    "zero",
    "eight",
    "one",
    "nine",
    "five",
    "two",
    "seven",
    "four",
    "six",
)

_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
)
_VAL_SHARE = 0.2


def source_indices(split: str) -> range:
    """Return which rows of `load_digits` a split may use.

    The file is in order of its writers, so cutting it once keeps most writers of
    the last part unseen, too.
    """
    num_digits = len(load_digits().target)
    cut = round(num_digits * (1 - _VAL_SHARE))
    return range(cut) if split == "train" else range(cut, num_digits)


def build_renderer(split: str) -> Renderer:
    """Return the renderer of a split, which holds that split's digits only."""
    source = load_digits()
    rows = source_indices(split)
    bitmaps, labels = source.images[rows], source.target[rows]

    def render(size_hw: tuple[int, int], rng: np.random.Generator) -> Canvas:
        canvas = Canvas(_ruled_paper(size_hw, rng))
        for _ in range(rng.integers(0, 4)):
            stroke = sprites.stick(_ink(rng))
            size, angle = sprites.random_size(rng, high=44), rng.uniform(0, np.pi)
            canvas.scatter(sprites.draw(stroke, size=size, angle=angle), rng, name=None)
        for _ in range(rng.integers(1, 8)):
            index = rng.integers(len(labels))
            sprite = _digit(bitmaps[index], rng)
            canvas.scatter(sprite, rng, name=_WORDS[labels[index]])
        canvas.pixels += textures.grain(size_hw, rng, sigma=0.015)
        return canvas

    return render


def _ruled_paper(size_hw: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    tone = rng.uniform(0.78, 0.97)
    paper = textures.flat(size_hw, (tone, tone, tone * 0.97))
    spacing = int(rng.integers(10, 20))
    paper[int(rng.integers(spacing)) :: spacing] *= (0.8, 0.88, 0.97)
    return paper + 0.04 * textures.clouds(size_hw, rng, cells_hw=(3, 3))


def _ink(rng: np.random.Generator) -> sprites.Color:
    tone = rng.uniform(0.05, 0.35)
    return tone, tone, min(1.0, tone + rng.uniform(0, 0.25))


def _digit(bitmap: np.ndarray, rng: np.random.Generator) -> Sprite:
    size = sprites.random_size(rng, low=32, high=56)
    bordered = np.pad(bitmap / 16 * 255, 1).astype(np.uint8)
    image = Image.fromarray(bordered).resize((size, size), Image.Resampling.BICUBIC)
    image = image.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    # A pen leaves ink or none; the source counts ink per 4x4 cell, which is softer.
    alpha = ((np.asarray(image) / 255 - 0.25) * 2.5).clip(0, 1)
    color = np.broadcast_to(np.array(_ink(rng)), (*alpha.shape, 3))
    return sprites.trim(Sprite(color=color, alpha=alpha))
