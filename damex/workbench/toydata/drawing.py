"""Shapes, backgrounds and noise, and a canvas that keeps track of the visible boxes.

Legend: H, W = height and width of the canvas, h, w = of a sprite; colours are floats in
[0, 1], RGB. A sprite (h, w, 4) has colours and the coverage of its object. A pixel
belongs to an object if the object covers at least half of it and no later sprite does.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

Color = tuple[float, float, float]
Range = tuple[float, float]
# Corners (N, 2) in the unit disc, x to the right and y down; and a fixed colour, a
# brightness of the drawing's colour (1 keeps it), or None for a hole.
Layer = tuple[Sequence[tuple[float, float]] | np.ndarray, Color | float | None]

MIN_VISIBLE = 0.6
MAX_BOX_OVERLAP = 0.3
_OVERSAMPLING = 4
_WHITE: Color = (0.95, 0.95, 0.92)
_DARK: Color = (0.12, 0.12, 0.14)
_GLASS: Color = (0.75, 0.88, 0.95)


def _regular(
    num_corners: int, *, radius: float = 1.0, center: tuple[float, float] = (0.0, 0.0)
) -> np.ndarray:
    turns = np.arange(num_corners) / num_corners * 2 * np.pi
    x = center[0] + radius * np.sin(turns)
    y = center[1] - radius * np.cos(turns)
    return np.stack([x, y], axis=1)


def _rectangle(right: float, bottom: float) -> list[tuple[float, float]]:
    return [(-right, -bottom), (right, -bottom), (right, bottom), (-right, bottom)]


_ALONG = np.linspace(-1, 1, 17)
_EDGE = np.stack([_ALONG, 0.42 * np.cos(_ALONG * np.pi / 2)], axis=1)
_STAR = _regular(10) * np.where(np.arange(10) % 2 == 0, 1.0, 0.45)[:, None]
_KITE = np.array([(0.0, -1.0), (0.6, -0.35), (0.0, 0.7), (-0.6, -0.35)])

# The layers of each drawing, first to last; the first has a colour.
SHAPES: Mapping[str, Sequence[Layer]] = {
    "circle": [(_regular(48), 1)],
    "ring": [(_regular(48), 1), (_regular(48, radius=0.55), None)],
    "square": [(_rectangle(0.7, 0.7), 1)],
    "triangle": [(_regular(3), 1)],
    "star": [(_STAR, 1)],
    "shiny_disc": [
        (_regular(48), 0.55),
        (_regular(48, radius=0.82), 1),
        (_regular(24, radius=0.22, center=(-0.3, -0.35)), _WHITE),
    ],
    "framed_box": [
        (_rectangle(0.7, 0.7), 0.55),
        (_rectangle(0.52, 0.52), 1),
        ([(-0.6, 0.4), (-0.4, 0.6), (0.6, -0.4), (0.4, -0.6)], 0.55),
    ],
    "split_wedge": [
        ([(0.0, -1.0), (0.75, 0.65), (-0.75, 0.65)], 1),
        ([(0.0, -1.0), (0.75, 0.65), (0.0, 0.4)], 0.55),
    ],
    "car": [  # seen from the side, heading right
        ([(-0.95, -0.1), (0.95, -0.1), (0.95, 0.26), (-0.95, 0.26)], 1),
        ([(-0.6, -0.05), (-0.38, -0.42), (0.25, -0.42), (0.55, -0.05)], 1),
        ([(-0.42, -0.08), (-0.3, -0.32), (0.18, -0.32), (0.36, -0.08)], _GLASS),
        (_regular(20, radius=0.2, center=(-0.5, 0.28)), _DARK),
        (_regular(20, radius=0.2, center=(0.5, 0.28)), _DARK),
    ],
    "kite": [
        (_KITE, 1),
        (_KITE[:3] * 0.98, 0.6),
        ([(-0.18, 0.95), (0.0, 0.6), (0.18, 0.95)], _WHITE),
    ],
    "leaf": [
        (np.concatenate([_EDGE, _EDGE[::-1] * (1, -1)]), 1),
        (_rectangle(0.8, 0.04), _WHITE),
    ],
    "cross": [(_rectangle(0.95, 0.2), 1), (_rectangle(0.2, 0.95), 1)],
    "stick": [(_rectangle(0.97, 0.08), 1)],
}


def draw(
    layers: Sequence[Layer], color: Color, *, size: int, angle: float = 0.0
) -> np.ndarray:
    """Draw layers, first to last, as a sprite (h, w, 4) without empty border.

    Drawn at four times the size and averaged down: soft edges and exact coverage.
    ``color`` is that of layers with a brightness, ``size`` the side in pixels of the
    square around the unit disc, and ``angle`` a clockwise rotation in radians.
    """
    side = size * _OVERSAMPLING
    paints = [
        shade(color, paint) if isinstance(paint, float | int) else paint
        for _, paint in layers
    ]
    image = Image.new("RGB", (side, side), _to_bytes(paints[0] or color))
    alpha = Image.new("L", (side, side), 0)
    draw_color, draw_alpha = ImageDraw.Draw(image), ImageDraw.Draw(alpha)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    for (points, _), paint in zip(layers, paints, strict=True):
        corners = ((np.array(points) @ turn + 1) / 2 * (side - 1)).round().astype(int)
        flat_corners = corners.ravel().tolist()
        draw_alpha.polygon(flat_corners, fill=0 if paint is None else 255)
        if paint is not None:
            draw_color.polygon(flat_corners, fill=_to_bytes(paint))
    parts = [np.asarray(part.reduce(_OVERSAMPLING)) for part in (image, alpha)]
    return trim(np.dstack(parts) / 255)


def _to_bytes(color: Color) -> tuple[int, int, int]:
    red, green, blue = (round(255 * channel) for channel in color)
    return red, green, blue


def draw_random(
    shape: str,
    rng: np.random.Generator,
    *,
    color: Color | None = None,
    saturation: Range = (0.5, 1.0),
    value: Range = (0.5, 1.0),
    size: Range = (26, 60),
    angle: Range = (0, 2 * np.pi),
) -> np.ndarray:
    """Draw one of ``SHAPES`` with colour, size and angle from the given ranges."""
    color = color or random_color(rng, saturation=saturation, value=value)
    side = random_size(rng, *size)
    return draw(SHAPES[shape], color, size=side, angle=rng.uniform(*angle))


def random_color(rng: np.random.Generator, *, saturation: Range, value: Range) -> Color:
    """Return a colour of any hue with saturation and value in the given ranges."""
    hue = rng.uniform()
    return colorsys.hsv_to_rgb(hue, rng.uniform(*saturation), rng.uniform(*value))


def random_size(rng: np.random.Generator, low: float, high: float) -> int:
    """Return a side in pixels, log-uniform, so that small ones are not rare."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


def shade(color: Color, factor: float) -> Color:
    """Return a darker (factor below 1) or lighter (above 1) shade of a colour."""
    red, green, blue = (min(1.0, channel * factor) for channel in color)
    return red, green, blue


def trim(sprite: np.ndarray) -> np.ndarray:
    """Cut away the empty border of a sprite."""
    x, y, width, height = _extent(sprite[:, :, 3] > 0)
    return sprite[y : y + height, x : x + width]


def clouds(
    size_hw: tuple[int, int], rng: np.random.Generator, *, cells_hw: tuple[int, int]
) -> np.ndarray:
    """Return smooth noise in [-1, 1] of the given number of blobs, shape (H, W, 1)."""
    coarse = Image.fromarray(rng.integers(0, 256, cells_hw, dtype=np.uint8))
    fine = coarse.resize(size_hw[::-1], Image.Resampling.BICUBIC)
    return np.asarray(fine, dtype=np.float64)[:, :, None] / 127.5 - 1


def grain(
    size_hw: tuple[int, int], rng: np.random.Generator, *, sigma: float
) -> np.ndarray:
    """Return Gaussian pixel noise, equal in all channels, shape (H, W, 1)."""
    return rng.normal(0.0, sigma, (*size_hw, 1))


class Box(NamedTuple):
    """An axis-aligned box in whole pixels, with the class name of its object."""

    name: str
    x: int
    y: int
    width: int
    height: int

    def overlap(self, other: Box) -> float:
        """Return the shared area as a fraction of the smaller box's area."""
        width = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        height = min(self.y + self.height, other.y + other.height)
        height -= max(self.y, other.y)
        smaller = min(self.width * self.height, other.width * other.height)
        return max(width, 0) * max(height, 0) / smaller


class Canvas:
    """A background (H, W, 3) for sprites, pasted later ones over earlier ones."""

    def __init__(self, background: np.ndarray) -> None:
        self.pixels = background.astype(np.float64)
        # Of each object: its box and number of pixels, and which are visible.
        self._objects: list[tuple[Box, int, np.ndarray]] = []

    def paste(self, sprite: np.ndarray, x: int, y: int, *, name: str | None) -> bool:
        """Paste a sprite, its top left corner at (x, y); return False if impossible.

        Nothing changes if less than `MIN_VISIBLE` of an earlier object would stay
        visible, or if two boxes would share more than `MAX_BOX_OVERLAP` of the smaller
        one, as thin objects could. Without a class name the sprite is a distractor and
        gets no box.
        """
        height, width = sprite.shape[:2]
        area = (slice(y, y + height), slice(x, x + width))
        color, alpha = sprite[:, :, :3], sprite[:, :, 3:]
        solid_HW = np.zeros(self.pixels.shape[:2], dtype=bool)
        solid_HW[area] = sprite[:, :, 3] >= 0.5
        left = [
            (box, n, visible_HW & ~solid_HW) for box, n, visible_HW in self._objects
        ]
        if any(visible_HW.sum() < MIN_VISIBLE * n for _, n, visible_HW in left):
            return False
        if name is not None:
            box = Box(name, *_extent(solid_HW))
            if any(box.overlap(one) > MAX_BOX_OVERLAP for one, *_ in left):
                return False
            left.append((box, int(solid_HW.sum()), solid_HW))
        self._objects = left
        self.pixels[area] = self.pixels[area] * (1 - alpha) + color * alpha
        return True

    def scatter(
        self, sprite: np.ndarray, rng: np.random.Generator, *, name: str | None
    ) -> None:
        """Paste a sprite at a random allowed place, unless a few tries find none."""
        rows = self.pixels.shape[0] - sprite.shape[0]
        columns = self.pixels.shape[1] - sprite.shape[1]
        if rows < 0 or columns < 0:
            return
        for _ in range(8):
            x, y = int(rng.integers(columns + 1)), int(rng.integers(rows + 1))
            if self.paste(sprite, x, y, name=name):
                break

    def boxes(self) -> list[Box]:
        """Return the tight box of the visible pixels of every object."""
        return [Box(box.name, *_extent(mask)) for box, _, mask in self._objects]

    def image(self) -> Image.Image:
        """Return the picture as 8-bit RGB."""
        return Image.fromarray((self.pixels.clip(0, 1) * 255).round().astype(np.uint8))


def _extent(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Bounding box of a mask: x, y, width and height."""
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    x, y = int(columns[0]), int(rows[0])
    return x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1
