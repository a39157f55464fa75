"""`shapes`: flat shapes on soft pastel fades, some of them hard to see."""

from __future__ import annotations

import numpy as np

from damex.datasets.minimix import sprites, textures
from damex.datasets.minimix.canvas import Canvas
from damex.datasets.minimix.spec import Renderer

CLASSES = ("star", "square", "circle", "ring", "triangle")

_DRAWINGS = {
    "star": sprites.star,
    "square": sprites.square,
    "circle": sprites.disc,
    "ring": sprites.ring,
    "triangle": sprites.triangle,
}
_FAINT_SHARE = 0.15


def build_renderer(split: str) -> Renderer:
    """Return the renderer; drawn from nothing, so it is the same in every split."""
    del split
    return _render


def _render(size_hw: tuple[int, int], rng: np.random.Generator) -> Canvas:
    first, last = (
        sprites.random_color(rng, saturation=(0.05, 0.35), value=(0.6, 0.95))
        for _ in range(2)
    )
    background = textures.gradient(
        size_hw, first, last, angle=rng.uniform(0, 2 * np.pi)
    )
    canvas = Canvas(background)
    for _ in range(rng.integers(2, 7)):
        drawing = (sprites.stick, sprites.cross)[rng.integers(2)]
        _scatter(canvas, drawing, rng, high=40, name=None)
    for _ in range(rng.integers(1, 8)):
        name = CLASSES[rng.integers(len(CLASSES))]
        _scatter(canvas, _DRAWINGS[name], rng, high=60, name=name)
    canvas.pixels += textures.grain(size_hw, rng, sigma=0.02)
    return canvas


def _scatter(
    canvas: Canvas,
    drawing: sprites.Drawing,
    rng: np.random.Generator,
    *,
    high: int,
    name: str | None,
) -> None:
    faint = rng.uniform() < _FAINT_SHARE
    color = sprites.random_color(
        rng,
        saturation=(0.15, 0.4) if faint else (0.5, 1.0),
        value=(0.55, 0.75) if faint else (0.35, 1.0),
    )
    size = sprites.random_size(rng, high=high)
    sprite = sprites.draw(drawing(color), size=size, angle=rng.uniform(0, 2 * np.pi))
    canvas.scatter(sprite, rng, name=name)
