"""A picture under construction and the boxes that are true for it.

Legend: H, W = height and width of the canvas, h, w = of a sprite; colours are
floats in [0, 1], RGB. A pixel belongs to an object when the object covers at least
half of it and no later sprite does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

MIN_VISIBLE = 0.6
MAX_BOX_OVERLAP = 0.3
_SOLID_ALPHA = 0.5


@dataclass(frozen=True)
class Sprite:
    """One drawn thing, ready to be pasted.

    Attributes:
        color: RGB of shape (h, w, 3).
        alpha: Coverage of shape (h, w), 0 outside the thing.
    """

    color: np.ndarray
    alpha: np.ndarray


@dataclass(frozen=True)
class Box:
    """An axis-aligned box in whole pixels, with the class name of its object."""

    name: str
    x: int
    y: int
    width: int
    height: int

    def overlap(self, other: Box) -> float:
        """Return the shared area as a part of the smaller box's area."""
        width = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        height = min(self.y + self.height, other.y + other.height)
        height -= max(self.y, other.y)
        smaller = min(self.width * self.height, other.width * other.height)
        return max(width, 0) * max(height, 0) / smaller


@dataclass
class _Placed:
    """A pasted object: its box when whole, and its pixels that are still visible."""

    whole: Box
    num_pixels: int
    visible: np.ndarray


class Canvas:
    """A background on which sprites are pasted, later ones over earlier ones.

    Args:
        background: RGB of shape (H, W, 3); copied.
    """

    def __init__(self, background: np.ndarray) -> None:
        self.pixels = background.astype(np.float64)
        self._placed: list[_Placed] = []

    def paste(self, sprite: Sprite, x: int, y: int, *, name: str | None) -> bool:
        """Paste a sprite, unless it would hide too much of an earlier object.

        Args:
            sprite: What to paste; it must fit inside the canvas at (x, y).
            x: Column of the sprite's left edge.
            y: Row of the sprite's top edge.
            name: Class name, or None for a distractor, which gets no box.

        Returns:
            Whether it was pasted. Nothing changes if less than `MIN_VISIBLE` of an
            earlier object would stay visible, or if two boxes would share more than
            `MAX_BOX_OVERLAP` of the smaller one, as thin objects could.
        """
        height, width = sprite.alpha.shape
        area = (slice(y, y + height), slice(x, x + width))
        solid_HW = np.zeros(self.pixels.shape[:2], dtype=bool)
        solid_HW[area] = sprite.alpha >= _SOLID_ALPHA
        left = [placed.visible & ~solid_HW for placed in self._placed]
        for placed, visible_HW in zip(self._placed, left, strict=True):
            if visible_HW.sum() < MIN_VISIBLE * placed.num_pixels:
                return False
        if name is not None:
            box = _tight_box(name, solid_HW)
            if any(box.overlap(p.whole) > MAX_BOX_OVERLAP for p in self._placed):
                return False
        for placed, visible_HW in zip(self._placed, left, strict=True):
            placed.visible = visible_HW
        if name is not None:
            self._placed.append(_Placed(box, int(solid_HW.sum()), solid_HW))
        alpha = sprite.alpha[:, :, None]
        self.pixels[area] = self.pixels[area] * (1 - alpha) + sprite.color * alpha
        return True

    def scatter(
        self, sprite: Sprite, rng: np.random.Generator, *, name: str | None
    ) -> bool:
        """Paste a sprite at a random place that hides no earlier object too much.

        Args:
            sprite: What to paste.
            rng: Source of the place.
            name: Class name, or None for a distractor.

        Returns:
            Whether a place was found in a few tries.
        """
        rows = self.pixels.shape[0] - sprite.alpha.shape[0]
        columns = self.pixels.shape[1] - sprite.alpha.shape[1]
        if rows < 0 or columns < 0:
            return False
        for _ in range(8):
            x, y = int(rng.integers(columns + 1)), int(rng.integers(rows + 1))
            if self.paste(sprite, x, y, name=name):
                return True
        return False

    def boxes(self) -> list[Box]:
        """Return the tight box of the visible pixels of every object."""
        return [_tight_box(p.whole.name, p.visible) for p in self._placed]

    def image(self) -> Image.Image:
        """Return the picture as 8-bit RGB."""
        return Image.fromarray((self.pixels.clip(0, 1) * 255).round().astype(np.uint8))


def _tight_box(name: str, mask_HW: np.ndarray) -> Box:
    rows = np.flatnonzero(mask_HW.any(axis=1))
    columns = np.flatnonzero(mask_HW.any(axis=0))
    x, y = int(columns[0]), int(rows[0])
    return Box(name, x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1)
