"""`photos`: prints of stickers on the two sample photographs of scikit-learn."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from damex.datasets.minimix import sprites, textures
from damex.datasets.minimix.canvas import Canvas, Sprite
from damex.datasets.minimix.spec import Renderer

CLASSES = ("leaf", "circle", "car", "kite")

_DRAWINGS = {
    "car": sprites.car,
    "circle": sprites.disc,
    "kite": sprites.kite,
    "leaf": sprites.leaf,
}
# Strips take turns, so that both splits see all of each scene and share no pixel.
_NUM_STRIPS = 5


def source_columns(split: str, *, width: int) -> tuple[tuple[int, int], ...]:
    """Return the strips of a photograph, as (first, end) columns, that a split uses."""
    edges = [round(width * strip / _NUM_STRIPS) for strip in range(_NUM_STRIPS + 1)]
    strips = tuple(pairwise(edges))
    return strips[0::2] if split == "train" else strips[1::2]


def build_renderer(split: str) -> Renderer:
    """Return the renderer of a split, which holds that split's part of the photos."""
    parts = []
    for photo in load_sample_images().images:
        for first, end in source_columns(split, width=photo.shape[1]):
            parts.append(photo[:, first:end])

    def render(size_hw: tuple[int, int], rng: np.random.Generator) -> Canvas:
        canvas = Canvas(_crop(parts[rng.integers(len(parts))], size_hw, rng))
        for _ in range(rng.integers(1, 7)):
            name = CLASSES[rng.integers(len(CLASSES))]
            canvas.scatter(_sticker(name, rng), rng, name=name)
        canvas.pixels += 0.12 * textures.print_screen(size_hw, period=6.0)
        return canvas

    return render


def _crop(
    photo: np.ndarray, size_hw: tuple[int, int], rng: np.random.Generator
) -> np.ndarray:
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
    color = sprites.random_color(rng, saturation=(0.3, 1.0), value=(0.4, 1.0))
    turn = 0.3 if name == "car" else np.pi
    sprite = sprites.draw(
        _DRAWINGS[name](color),
        size=sprites.random_size(rng, low=30 if name == "car" else 26),
        angle=rng.uniform(-turn, turn),
    )
    # A little of the photograph shines through, as light does on a print.
    return Sprite(color=sprite.color, alpha=sprite.alpha * rng.uniform(0.75, 1.0))
