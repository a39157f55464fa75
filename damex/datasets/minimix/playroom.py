"""`playroom`: toys on a warm wooden floor."""

from __future__ import annotations

import numpy as np

from damex.datasets.minimix import sprites, textures
from damex.datasets.minimix.canvas import Canvas
from damex.datasets.minimix.spec import Renderer
from damex.datasets.minimix.tokens import draw_token

CLASSES = ("crate", "roof", "ball", "car")

_TOKENS = ("ball", "crate", "roof")
_WOOD: sprites.Color = (0.72, 0.52, 0.33)


def build_renderer(split: str) -> Renderer:
    """Return the renderer; drawn from nothing, so it is the same in every split."""
    del split
    return _render


def _render(size_hw: tuple[int, int], rng: np.random.Generator) -> Canvas:
    canvas = Canvas(_floor(size_hw, rng))
    for _ in range(rng.integers(1, 5)):
        color = sprites.random_color(rng, saturation=(0.3, 0.9), value=(0.45, 0.95))
        size, angle = sprites.random_size(rng, high=48), rng.uniform(0, np.pi)
        stick = sprites.draw(sprites.stick(color), size=size, angle=angle)
        canvas.scatter(stick, rng, name=None)
    for _ in range(rng.integers(1, 8)):
        kind = int(rng.integers(len(CLASSES)))
        if kind < len(_TOKENS):
            canvas.scatter(draw_token(kind, rng), rng, name=_TOKENS[kind])
        else:
            color = sprites.random_color(rng)
            size, angle = sprites.random_size(rng, low=30), rng.uniform(-0.3, 0.3)
            toy = sprites.draw(sprites.car(color), size=size, angle=angle)
            canvas.scatter(toy, rng, name="car")
    canvas.pixels += textures.grain(size_hw, rng, sigma=0.015)
    return canvas


def _floor(size_hw: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    floor = textures.flat(size_hw, sprites.shade(_WOOD, rng.uniform(0.75, 1.2)))
    plank = int(rng.integers(16, 32))
    starts = range(-int(rng.integers(plank)), size_hw[1], plank)
    for start in starts:
        floor[:, max(start, 0) : start + plank] *= rng.uniform(0.85, 1.12)
        floor[:, max(start, 0) : max(start + 1, 0)] *= 0.6
    # Blobs that are long down and narrow across look like the grain of wood.
    return floor * (1 + 0.1 * textures.clouds(size_hw, rng, cells_hw=(4, 48)))
