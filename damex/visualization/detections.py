"""A picture of detections: a few images per dataset, truth beside prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["Panel", "draw_panels"]

TRUTH_COLOUR = (40, 170, 60)
FOUND_COLOUR = (225, 60, 50)
INK = (30, 30, 30)
GAP = 8
HEADER = 22


@dataclass(frozen=True)
class Panel:
    """One image with its boxes.

    Args:
        path: The image file.
        truth: (label, (x1, y1, x2, y2)) of annotated objects, in pixels.
        found: (label, score, (x1, y1, x2, y2)) of detections, in pixels.
    """

    path: str
    truth: Sequence[tuple[str, Sequence[float]]]
    found: Sequence[tuple[str, float, Sequence[float]]]


def draw_panels(
    rows: Mapping[str, Sequence[Panel]], *, panel_size: int = 256
) -> Image.Image:
    """Draw a sheet with one row per dataset: annotation left, detections right.

    Args:
        rows: Panels by dataset name.
        panel_size: Longest side of one image on the sheet, in pixels.

    Returns:
        An RGB picture.
    """
    columns = max(len(panels) for panels in rows.values())
    pair = 2 * panel_size + GAP
    width = columns * (pair + GAP) + GAP
    height = len(rows) * (panel_size + HEADER + GAP) + GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    y = GAP
    for name, panels in rows.items():
        title = f"{name}   green: annotated   red: detected"
        draw.text((GAP, y + 4), title, fill=INK, font=ImageFont.load_default(13))
        for column, panel in enumerate(panels):
            x = GAP + column * (pair + GAP)
            boxes = [(label, None, box) for label, box in panel.truth]
            left = _draw_boxes(panel.path, boxes, TRUTH_COLOUR, panel_size)
            right = _draw_boxes(panel.path, panel.found, FOUND_COLOUR, panel_size)
            sheet.paste(left, (x, y + HEADER))
            sheet.paste(right, (x + panel_size + GAP // 2, y + HEADER))
        y += panel_size + HEADER + GAP
    return sheet


def _draw_boxes(
    path: str,
    boxes: Sequence[tuple[str, float | None, Sequence[float]]],
    colour: tuple[int, int, int],
    size: int,
) -> Image.Image:
    """One image, enlarged or reduced to ``size``, with its boxes and names."""
    image = Image.open(path).convert("RGB")
    scale = size / max(image.size)
    shape = [max(1, round(side * scale)) for side in image.size]
    canvas = image.resize((shape[0], shape[1]), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(11)
    for label, score, box in boxes:
        x1, y1, x2, y2 = (np.asarray(box, dtype=float) * scale).tolist()
        draw.rectangle((x1, y1, x2, y2), outline=colour, width=2)
        text = label if score is None else f"{label} {score:.2f}"
        left, top, right, bottom = draw.textbbox((x1, y1), text, font=font)
        shift = min(0.0, canvas.width - right)
        lift = -(bottom - top + 3) if y1 > bottom - top + 3 else 0
        spot = (left + shift, top + lift, right + shift + 2, bottom + lift + 2)
        draw.rectangle(spot, fill=colour)
        draw.text((x1 + shift + 1, y1 + lift), text, fill="white", font=font)
    return canvas
