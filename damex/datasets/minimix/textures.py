"""Backgrounds and noise, from a random generator and a size.

Legend: H, W = height and width in pixels; colours are floats in [0, 1], RGB.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from damex.datasets.minimix.sprites import Color


def flat(size_hw: tuple[int, int], color: Color) -> np.ndarray:
    """Return one colour everywhere, shape (H, W, 3)."""
    return np.broadcast_to(np.array(color), (*size_hw, 3)).copy()


def gradient(
    size_hw: tuple[int, int], first: Color, last: Color, *, angle: float
) -> np.ndarray:
    """Return a straight fade between two colours, shape (H, W, 3).

    Args:
        size_hw: Height and width.
        first: Colour where the fade starts.
        last: Colour where the fade ends.
        angle: Direction of the fade in radians, 0 is to the right.
    """
    rows, columns = np.mgrid[: size_hw[0], : size_hw[1]]
    along = columns * np.cos(angle) + rows * np.sin(angle)
    along = ((along - along.min()) / np.ptp(along))[:, :, None]
    return np.array(first) * (1 - along) + np.array(last) * along


def clouds(
    size_hw: tuple[int, int], rng: np.random.Generator, *, cells_hw: tuple[int, int]
) -> np.ndarray:
    """Return smooth noise in [-1, 1], shape (H, W, 1).

    Args:
        size_hw: Height and width.
        rng: Source of the noise.
        cells_hw: Number of blobs down and across.
    """
    coarse = Image.fromarray(rng.integers(0, 256, cells_hw, dtype=np.uint8))
    fine = coarse.resize(size_hw[::-1], Image.Resampling.BICUBIC)
    return np.asarray(fine, dtype=np.float64)[:, :, None] / 127.5 - 1


def grain(
    size_hw: tuple[int, int], rng: np.random.Generator, *, sigma: float
) -> np.ndarray:
    """Return Gaussian pixel noise that is equal in all channels, shape (H, W, 1)."""
    return rng.normal(0.0, sigma, (*size_hw, 1))


def print_screen(size_hw: tuple[int, int], *, period: float) -> np.ndarray:
    """Return the dots of a printed photograph in [-1, 1], shape (H, W, 1).

    Args:
        size_hw: Height and width.
        period: Pixels from dot to dot along a diagonal line of the screen.
    """
    rows, columns = np.mgrid[: size_hw[0], : size_hw[1]]
    falling = np.cos(2 * np.pi * (columns + rows) / period)
    rising = np.cos(2 * np.pi * (columns - rows) / period)
    return ((falling + rising) / 2)[:, :, None]
