"""The three drawings that `playroom` and `arcade` share under different names.

Both worlds call `draw_token` with the same ranges, so shape, colour, size and angle
have one distribution. Only what surrounds an object tells what it is called.
"""

from __future__ import annotations

import numpy as np

from damex.datasets.minimix import sprites
from damex.datasets.minimix.canvas import Sprite

_DRAWINGS: tuple[sprites.Drawing, ...] = (
    sprites.shiny_disc,
    sprites.framed_box,
    sprites.split_wedge,
)


def draw_token(kind: int, rng: np.random.Generator) -> Sprite:
    """Draw one shared object.

    Args:
        kind: 0 for the disc, 1 for the box, 2 for the wedge.
        rng: Source of colour, size and angle.

    Returns:
        The sprite.
    """
    color = sprites.random_color(rng, saturation=(0.3, 0.9), value=(0.45, 0.95))
    size, angle = sprites.random_size(rng), rng.uniform(0, 2 * np.pi)
    return sprites.draw(_DRAWINGS[kind](color), size=size, angle=angle)
