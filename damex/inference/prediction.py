"""Prediction: what was found in one image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Prediction:
    """What was found in one image, best first.

    Attributes:
        path: The image file; None for an array.
        width: Of the image in pixels.
        height: The same.
        boxes: (n, 4) as x1, y1, x2, y2 in pixels of the image.
        scores: (n,) in [0, 1].
        labels: (n,) numbers of classes, as in ``Predictor.classes``.
        names: The n names of these classes.
        dataset: The dataset whose classes were looked for; None for all classes.
        probabilities: How probable the detector takes each dataset of its training to
            be, as it looks at the image; they add up to 1. Datasets that share experts
            are one, by the name of their group. Empty where the detector cannot tell,
            or was told.
    """

    path: Path | None
    width: int
    height: int
    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]
    dataset: str | None
    probabilities: Mapping[str, float]

    @property
    def likeness(self) -> float | None:
        """Probability of the most probable dataset; None where there is none."""
        return max(self.probabilities.values(), default=None)
