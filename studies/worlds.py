"""Worlds: the datasets of a positive control, generated like the toy mixture.

    python -m studies.worlds --out data/worlds --count 8

Worlds differ in background and in the names of objects: eight kinds of objects, each
with its own shape and colour, appear in every world in equal numbers. With ``agreeing``
names a kind has the same name everywhere; with ``conflicting`` names world m calls kind
k by word (k + m) mod 8, so that a name follows from neither the object nor the
background alone. They isolate one reason why experts should win: conflicting labels. A
single FFN has to learn the words of all worlds, an expert those of one
(docs/research/results.md).
"""

from __future__ import annotations

import colorsys
import sys
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from damex.errors import ConfigError
from damex.workbench.cli.run import NonNegativeInt, program, run_command
from damex.workbench.toydata import (
    DatasetSpec,
    Size,
    drawing,
    generate_toy_mixture,
)
from damex.workbench.toydata.drawing import Canvas, draw_random

WORLDS = ("ruby", "amber", "olive", "mint", "teal", "azure", "indigo", "plum")
KINDS = ("circle", "ring", "square", "triangle", "star", "cross", "leaf", "kite")
WORDS = ("blick", "dax", "fep", "gorp", "mip", "toma", "wug", "zot")
Names = Literal["conflicting", "agreeing"]

app = program(
    "python -m studies.worlds",
    "Generate datasets that share their objects, and differ in the names of these.",
    "python -m studies.worlds --out data/worlds --count 8",
)


@app.default
def worlds(
    *,
    out: Path,
    count: int = 8,
    names: Names = "conflicting",
    train: int = 300,
    val: int = 60,
    seed: NonNegativeInt = 0,
) -> None:
    """Generate worlds in a new folder.

    Args:
        out: Output folder.
        count: Number of worlds, 1 to 8.
        names: Whether the worlds agree in the names of objects.
        train: Training images of each world.
        val: Validation images of each world.
        seed: Another one gives other images.
    """
    specs = world_specs(count, names=names, num_train=train, num_val=val)
    generate_toy_mixture(out, seed=seed, specs=specs)
    print(f"{out}: {count} worlds of {train} training and {val} validation images")


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
    if (least := min(num_train, num_val)) < 1:
        raise ConfigError(f"worlds: images of a split must be 1 or more, got {least}")
    step = int(names == "conflicting")
    worlds = [partial(_draw_world, world=m, shift=m * step) for m in range(count)]
    return tuple(
        DatasetSpec(name, WORDS, num_train, num_val, world)
        for name, world in zip(WORLDS, worlds, strict=False)
    )


def _draw_world(
    split: str, size_hw: Size, rng: np.random.Generator, *, world: int, shift: int
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
        canvas.scatter(sprite, rng, name=WORDS[(kind + shift) % len(WORDS)])
    canvas.pixels += drawing.grain(size_hw, rng, sigma=0.02)
    return canvas


def _ground(size_hw: Size, rng: np.random.Generator, *, world: int) -> np.ndarray:
    """A hue, and stripes of some direction and width, by which any part is known."""
    hue, value = world / len(WORLDS), rng.uniform(0.45, 0.65)
    color = colorsys.hsv_to_rgb(hue, rng.uniform(0.35, 0.6), value)
    angle, period = np.pi * (world % 4) / 4, (5.0, 12.0)[world // 4]
    rows, columns = np.mgrid[: size_hw[0], : size_hw[1]]
    along = columns * np.cos(angle) + rows * np.sin(angle)
    stripes = np.sign(np.sin(2 * np.pi * (along / period + rng.uniform())))
    return np.full((*size_hw, 3), color) * (1 + 0.25 * stripes[:, :, None])


if __name__ == "__main__":
    sys.exit(run_command(app))
