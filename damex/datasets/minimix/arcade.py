"""`arcade`: the drawings of `playroom`, other names, on a dark screen with a grid."""

from __future__ import annotations

import numpy as np

from damex.datasets.minimix import sprites, textures
from damex.datasets.minimix.canvas import Canvas
from damex.datasets.minimix.spec import Renderer
from damex.datasets.minimix.tokens import draw_token

CLASSES = ("ship", "coin", "chip", "star")

_TOKENS = ("coin", "chip", "ship")


def build_renderer(split: str) -> Renderer:
    """Return the renderer; drawn from nothing, so it is the same in every split."""
    del split
    return _render


def _render(size_hw: tuple[int, int], rng: np.random.Generator) -> Canvas:
    canvas = Canvas(_screen(size_hw, rng))
    for _ in range(rng.integers(1, 5)):
        color = sprites.random_color(rng, saturation=(0.3, 0.9), value=(0.45, 0.95))
        size, angle = sprites.random_size(rng, high=48), rng.uniform(0, np.pi)
        beam = sprites.draw(sprites.stick(color), size=size, angle=angle)
        canvas.scatter(beam, rng, name=None)
    for _ in range(rng.integers(1, 8)):
        kind = int(rng.integers(len(CLASSES)))
        if kind < len(_TOKENS):
            canvas.scatter(draw_token(kind, rng), rng, name=_TOKENS[kind])
        else:
            color = sprites.random_color(rng, value=(0.7, 1.0))
            size, angle = sprites.random_size(rng), rng.uniform(0, 2 * np.pi)
            bonus = sprites.draw(sprites.star(color), size=size, angle=angle)
            canvas.scatter(bonus, rng, name="star")
    canvas.pixels += textures.grain(size_hw, rng, sigma=0.015)
    return canvas


def _screen(size_hw: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    color = sprites.random_color(rng, saturation=(0.5, 0.9), value=(0.08, 0.2))
    screen = textures.flat(size_hw, color)
    spacing = int(rng.integers(8, 20))
    line = np.array(sprites.random_color(rng, value=(0.2, 0.35)))
    screen[int(rng.integers(spacing)) :: spacing] = line
    screen[:, int(rng.integers(spacing)) :: spacing] = line
    screen[::2] *= 0.8
    return screen
