"""Slopes of errors against the sample size, with intervals over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from torch import Tensor

__all__ = ["Claim", "interval", "median_curve", "slope"]


def median_curve(errors: Tensor) -> np.ndarray:
    """Median over repetitions for each sample size; NaN where all are NaN.

    Args:
        errors: (sizes, repetitions); NaN where a quantity is not defined, as the error
            of an over-specified cell when there is none.
    """
    return errors.nanmedian(dim=1).values.numpy()


def slope(sizes: Sequence[int], errors: np.ndarray) -> float:
    """Of a straight line through log error against log n; the r in n^r.

    Args:
        sizes: Sample sizes.
        errors: One per size; NaN is left out.

    Returns:
        The slope, NaN with fewer than two errors.
    """
    known = np.isfinite(errors) & (errors > 0)
    if known.sum() < 2:
        return float("nan")
    log_size = np.log(np.asarray(sizes, dtype=float)[known])
    return float(np.polyfit(log_size, np.log(errors[known]), 1)[0])


def interval(values: Sequence[float], *, level: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the mean from Student's t; infinite for one value.

    Args:
        values: One per seed.
        level: Its level.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return -float("inf"), float("inf")
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * stats.sem(values)
    return mean - float(half), mean + float(half)


@dataclass(frozen=True)
class Claim:
    """What the theory says of the slope of one quantity, and what counts as that.

    Attributes:
        quantity: Name as in `simulate`.
        label: For the report.
        published: The rate of the paper.
        low: Smallest mean slope that agrees; None where nothing is claimed of a fixed
            truth, so that the slope is only reported.
        high: Largest one.
        slower_than: The mean must lie above this instead: no such rate.
    """

    quantity: str
    label: str
    published: str
    low: float | None = None
    high: float | None = None
    slower_than: float | None = None

    def judge(self, slopes: Sequence[float]) -> tuple[str, bool | None]:
        """The criterion, with the interval of the slope, and whether it holds.

        Args:
            slopes: One per seed.
        """
        low, high = interval(slopes)
        found = f"95 % interval {low:.2f} to {high:.2f}" if len(slopes) > 1 else ""
        mean = float(np.mean(slopes))
        if self.slower_than is not None:
            text = f"mean above {self.slower_than}"
            return _join(text, found), mean > self.slower_than
        if self.low is None or self.high is None:
            return found, None
        text = f"mean in [{self.low}, {self.high}]"
        return _join(text, found), self.low <= mean <= self.high


def _join(*texts: str) -> str:
    return "; ".join(text for text in texts if text)
