"""Worlds: datasets that differ in background and in the names of objects.

Eight kinds of objects, each with its own shape and colour, appear in every world in
equal numbers. The worlds share eight words. With ``agreeing`` names a kind has the same
name everywhere; with ``conflicting`` names world m calls kind k by word (k + m) mod 8,
so that a name follows from neither the object nor the background alone.

The mixture isolates one reason why experts should win: conflicting labels. A single FFN
has to learn the words of all worlds, an expert those of one. Fewer worlds or agreeing
names remove the conflict; wider FFNs do not (docs/experts-results.md).
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
    """Describe the first `count` worlds (1 to 8), for `generate_toy_mixture`."""
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
    """Return the name of a kind; `shift` is 0 if names agree, else the world number."""
    return WORDS[(kind + shift) % len(WORDS)]


def _renderer(split: str, *, world: int, shift: int) -> Renderer:
    """Synthetic, so both splits use the same renderer."""
    del split
    return partial(_draw_world, world=world, shift=shift)


def _draw_world(
    size_hw: Size, rng: np.random.Generator, *, world: int, shift: int
) -> Canvas:
    """Draw the background, a few sticks, and two to six objects."""
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
    """Background of a world: its hue, and stripes of its direction and width.

    Any small part identifies the world: recognising it is not meant to be hard.
    """
    hue, value = world / len(WORLDS), rng.uniform(0.45, 0.65)
    color = colorsys.hsv_to_rgb(hue, rng.uniform(0.35, 0.6), value)
    angle, period = np.pi * (world % 4) / 4, (5.0, 12.0)[world // 4]
    rows, columns = np.mgrid[: size_hw[0], : size_hw[1]]
    along = columns * np.cos(angle) + rows * np.sin(angle)
    stripes = np.sign(np.sin(2 * np.pi * (along / period + rng.uniform())))
    return drawing.flat(size_hw, color) * (1 + 0.25 * stripes[:, :, None])
