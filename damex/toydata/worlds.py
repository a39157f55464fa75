"""Worlds: datasets that differ by their surroundings and by what they call things.

Eight kinds of objects, each with a shape and a colour of its own, appear in every world
in equal numbers. The worlds share eight words. With ``agreeing`` names a kind has the
same name everywhere; with ``conflicting`` ones world number m calls kind number k by
word (k + m) mod 8, so that every word means another kind in every world and what an
object is called follows from neither the object nor the surroundings alone.

The mixture isolates one cause for which experts should win: conflicting labels. A
single FFN has to learn the words of all worlds, an expert those of one. Fewer worlds or
agreeing names take the cause away; wider FFNs do not (docs/experts-results.md).
"""

from __future__ import annotations

import colorsys
from functools import partial
from typing import Literal, get_args

import numpy as np

from damex.errors import ConfigError
from damex.toydata import drawing
from damex.toydata.domains import DatasetSpec, Renderer, Size
from damex.toydata.drawing import Canvas, draw_random

Names = Literal["conflicting", "agreeing"]

WORLDS = ("ruby", "amber", "olive", "mint", "teal", "azure", "indigo", "plum")
KINDS = ("circle", "ring", "square", "triangle", "star", "cross", "leaf", "kite")
WORDS = ("blick", "dax", "fep", "gorp", "mip", "toma", "wug", "zot")


def world_specs(
    count: int,
    *,
    names: Names = "conflicting",
    num_train: int = 300,
    num_val: int = 60,
) -> tuple[DatasetSpec, ...]:
    """Describe the first worlds, for `generate_toy_mixture`.

    Args:
        count: Number of worlds, 1 to 8.
        names: Whether the worlds agree in what they call things.
        num_train: Training images of each world.
        num_val: Validation images of each.

    Raises:
        ConfigError: If a number or ``names`` cannot be.
    """
    if not 1 <= count <= len(WORLDS):
        raise ConfigError(f"worlds: count must be 1 to {len(WORLDS)}, got {count}")
    if names not in get_args(Names):
        raise ConfigError(f"worlds: names must be of {get_args(Names)}, got {names!r}")
    if min(num_train, num_val) < 1:
        raise ConfigError(
            f"worlds: num_train and num_val must be 1 or more, got {num_train} and "
            f"{num_val}"
        )
    return tuple(
        DatasetSpec(
            name,
            WORDS,
            num_train,
            num_val,
            partial(_renderer, world=world, shift=world * (names == "conflicting")),
            variant=names,
        )
        for world, name in enumerate(WORLDS[:count])
    )


def word_of(kind: int, *, shift: int) -> str:
    """What a kind is called in a world that shifts the words.

    Args:
        kind: Number of the kind in ``KINDS``.
        shift: 0 where names agree, the world's number where they conflict.
    """
    return WORDS[(kind + shift) % len(WORDS)]


def _renderer(split: str, *, world: int, shift: int) -> Renderer:
    """The same for both splits: what is drawn comes from nothing."""
    del split
    return partial(_draw_world, world=world, shift=shift)


def _draw_world(
    size_hw: Size, rng: np.random.Generator, *, world: int, shift: int
) -> Canvas:
    """One image: the world's ground, a few sticks, and two to six objects."""
    canvas = Canvas(_ground(size_hw, rng, world=world))
    for _ in range(rng.integers(0, 3)):
        stick = draw_random("stick", rng, saturation=(0.0, 0.2), size=(26, 44))
        canvas.scatter(stick, rng, name=None)
    for _ in range(rng.integers(2, 7)):
        kind = int(rng.integers(len(KINDS)))
        color = colorsys.hsv_to_rgb(
            kind / len(KINDS) + 1 / 16, rng.uniform(0.8, 1.0), rng.uniform(0.8, 1.0)
        )
        sprite = draw_random(KINDS[kind], rng, color=color, size=(28, 48))
        canvas.scatter(sprite, rng, name=word_of(kind, shift=shift))
    canvas.pixels += drawing.grain(size_hw, rng, sigma=0.02)
    return canvas


def _ground(size_hw: Size, rng: np.random.Generator, *, world: int) -> np.ndarray:
    """The ground of a world: a hue of its own, and stripes of a direction and width.

    Any small part of it tells the world: to recognise it is not what is hard here.
    """
    hue, value = world / len(WORLDS), rng.uniform(0.45, 0.65)
    color = colorsys.hsv_to_rgb(hue, rng.uniform(0.35, 0.6), value)
    angle, period = np.pi * (world % 4) / 4, (5.0, 12.0)[world // 4]
    rows, columns = np.mgrid[: size_hw[0], : size_hw[1]]
    along = columns * np.cos(angle) + rows * np.sin(angle)
    stripes = np.sign(np.sin(2 * np.pi * (along / period + rng.uniform())))
    return drawing.flat(size_hw, color) * (1 + 0.25 * stripes[:, :, None])
