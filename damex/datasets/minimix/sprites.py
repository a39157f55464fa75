"""Drawn objects: flat polygons with a few details, at any size and angle.

Every object is a list of layers in the unit disc (x to the right, y down), so that
it stays inside its square whatever its angle. Layers are drawn at four times the
size and averaged down, which gives soft edges and exact coverage.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from damex.datasets.minimix.canvas import Sprite

Color = tuple[float, float, float]

Drawing = Callable[[Color], list["Layer"]]

_OVERSAMPLING = 4
_WHITE: Color = (0.95, 0.95, 0.92)
_DARK: Color = (0.12, 0.12, 0.14)


@dataclass(frozen=True)
class Layer:
    """One polygon of a drawing.

    Attributes:
        points: Corners of shape (N, 2), in [-1, 1].
        color: Its colour, or None to cut a hole into the layers below.
    """

    points: np.ndarray
    color: Color | None


def draw(layers: list[Layer], *, size: int, angle: float = 0.0) -> Sprite:
    """Draw layers, first to last.

    Args:
        layers: What to draw; the first layer must have a colour.
        size: Side in pixels of the square around the unit disc.
        angle: Turn in radians, clockwise on the screen.

    Returns:
        A sprite of at most (size, size), without empty border.
    """
    side = size * _OVERSAMPLING
    base = layers[0].color or _DARK
    color = Image.new("RGB", (side, side), _to_bytes(base))
    alpha = Image.new("L", (side, side), 0)
    draw_color, draw_alpha = ImageDraw.Draw(color), ImageDraw.Draw(alpha)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    for layer in layers:
        corners = ((layer.points @ turn + 1) / 2 * (side - 1)).round().astype(int)
        flat = [int(value) for value in corners.ravel()]
        draw_alpha.polygon(flat, fill=0 if layer.color is None else 255)
        if layer.color is not None:
            draw_color.polygon(flat, fill=_to_bytes(layer.color))
    sprite = Sprite(color=_shrink(color), alpha=_shrink(alpha))
    return trim(sprite)


def trim(sprite: Sprite) -> Sprite:
    """Cut away the empty border of a sprite."""
    rows = np.flatnonzero((sprite.alpha > 0).any(axis=1))
    columns = np.flatnonzero((sprite.alpha > 0).any(axis=0))
    area = (
        slice(int(rows[0]), int(rows[-1]) + 1),
        slice(int(columns[0]), int(columns[-1]) + 1),
    )
    return Sprite(color=sprite.color[area], alpha=sprite.alpha[area])


def random_color(
    rng: np.random.Generator,
    *,
    saturation: tuple[float, float] = (0.5, 1.0),
    value: tuple[float, float] = (0.5, 1.0),
) -> Color:
    """Return a colour of any hue with saturation and value in the given ranges."""
    return colorsys.hsv_to_rgb(
        rng.uniform(), rng.uniform(*saturation), rng.uniform(*value)
    )


def random_size(rng: np.random.Generator, *, low: int = 26, high: int = 60) -> int:
    """Return a side in pixels, log-uniform, so that small ones are not rare."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


def shade(color: Color, factor: float) -> Color:
    """Return a darker (factor below 1) or lighter (above 1) shade of a colour."""
    red, green, blue = (min(1.0, channel * factor) for channel in color)
    return red, green, blue


def disc(color: Color) -> list[Layer]:
    """Return a flat disc."""
    return [Layer(_regular(48), color)]


def ring(color: Color) -> list[Layer]:
    """Return a disc with a round hole that shows the background."""
    return [Layer(_regular(48), color), Layer(_regular(48, radius=0.55), None)]


def square(color: Color) -> list[Layer]:
    """Return a flat square."""
    return [Layer(_box(-0.7, -0.7, 0.7, 0.7), color)]


def triangle(color: Color) -> list[Layer]:
    """Return a flat triangle with equal sides."""
    return [Layer(_regular(3), color)]


def star(color: Color) -> list[Layer]:
    """Return a flat star with five points."""
    radii = np.where(np.arange(10) % 2 == 0, 1.0, 0.45)[:, None]
    return [Layer(_regular(10) * radii, color)]


def shiny_disc(color: Color) -> list[Layer]:
    """Return a disc with a dark rim and a highlight."""
    return [
        Layer(_regular(48), shade(color, 0.55)),
        Layer(_regular(48, radius=0.82), color),
        Layer(_regular(24, radius=0.22, center=(-0.3, -0.35)), _WHITE),
    ]


def framed_box(color: Color) -> list[Layer]:
    """Return a square with a dark frame and a dark diagonal bar."""
    dark = shade(color, 0.55)
    bar = np.array([(-0.6, 0.4), (-0.4, 0.6), (0.6, -0.4), (0.4, -0.6)])
    return [
        Layer(_box(-0.7, -0.7, 0.7, 0.7), dark),
        Layer(_box(-0.52, -0.52, 0.52, 0.52), color),
        Layer(bar, dark),
    ]


def split_wedge(color: Color) -> list[Layer]:
    """Return a narrow triangle with a bright and a dark half."""
    return [
        Layer(np.array([(0.0, -1.0), (0.75, 0.65), (-0.75, 0.65)]), color),
        Layer(np.array([(0.0, -1.0), (0.75, 0.65), (0.0, 0.4)]), shade(color, 0.55)),
    ]


def car(color: Color) -> list[Layer]:
    """Return a car seen from the side, heading right."""
    cabin = np.array([(-0.6, -0.05), (-0.38, -0.42), (0.25, -0.42), (0.55, -0.05)])
    window = np.array([(-0.42, -0.08), (-0.3, -0.32), (0.18, -0.32), (0.36, -0.08)])
    return [
        Layer(_box(-0.95, -0.1, 0.95, 0.26), color),
        Layer(cabin, color),
        Layer(window, (0.75, 0.88, 0.95)),
        Layer(_regular(20, radius=0.2, center=(-0.5, 0.28)), _DARK),
        Layer(_regular(20, radius=0.2, center=(0.5, 0.28)), _DARK),
    ]


def kite(color: Color) -> list[Layer]:
    """Return a kite with two crossing halves and a short tail."""
    outline = np.array([(0.0, -1.0), (0.6, -0.35), (0.0, 0.7), (-0.6, -0.35)])
    tail = np.array([(-0.18, 0.95), (0.0, 0.6), (0.18, 0.95)])
    return [
        Layer(outline, color),
        Layer(outline[[0, 1, 2]] * (0.98, 0.98), shade(color, 0.6)),
        Layer(tail, _WHITE),
    ]


def leaf(color: Color) -> list[Layer]:
    """Return a pointed leaf with a light middle vein."""
    along = np.linspace(-1, 1, 17)
    across = 0.42 * np.cos(along * np.pi / 2)
    edge = np.stack([along, across], axis=1)
    outline = np.concatenate([edge, edge[::-1] * (1, -1)])
    return [Layer(outline, color), Layer(_box(-0.8, -0.04, 0.8, 0.04), _WHITE)]


def cross(color: Color) -> list[Layer]:
    """Return a plus sign, a distractor in every drawn dataset."""
    return [
        Layer(_box(-0.95, -0.2, 0.95, 0.2), color),
        Layer(_box(-0.2, -0.95, 0.2, 0.95), color),
    ]


def stick(color: Color) -> list[Layer]:
    """Return a thin bar, a distractor in every drawn dataset."""
    return [Layer(_box(-0.97, -0.08, 0.97, 0.08), color)]


def _regular(
    num_corners: int, *, radius: float = 1.0, center: tuple[float, float] = (0.0, 0.0)
) -> np.ndarray:
    turns = np.arange(num_corners) / num_corners * 2 * np.pi
    x = center[0] + radius * np.sin(turns)
    y = center[1] - radius * np.cos(turns)
    return np.stack([x, y], axis=1)


def _box(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom)])


def _shrink(image: Image.Image) -> np.ndarray:
    return np.asarray(image.reduce(_OVERSAMPLING), dtype=np.float64) / 255


def _to_bytes(color: Color) -> tuple[int, int, int]:
    red, green, blue = (round(255 * channel) for channel in color)
    return red, green, blue
