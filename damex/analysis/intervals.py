"""Numbers of several seeds: mean, spread, paired differences, and how to print them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import t as student_t

CONFIDENCE = 0.95


class Spread(NamedTuple):
    """Mean and sample standard deviation; None for the deviation of one number."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        if self.deviation is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


class Difference(NamedTuple):
    """Mean of the differences of pairs and its 95 % t-interval; None for one pair."""

    mean: float
    ci95: tuple[float, float] | None

    def __str__(self) -> str:
        if self.ci95 is None:
            return f"{self.mean:+.3f}"
        low, high = self.ci95
        return f"{self.mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and sample standard deviation.

    Args:
        values: One per seed; None where a run has not finished.

    Returns:
        Those of the known values; None if there are none.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(
        statistics.fmean(known), statistics.stdev(known) if known[1:] else None
    )


def paired_difference(
    values: Sequence[float | None],
    base: Sequence[float | None],
    *,
    comparisons: int = 1,
) -> Difference | None:
    """Mean difference of two methods that were run with the same seeds.

    A seed that is easy or hard for both drops out, so that the interval is narrower
    than the spreads of the two suggest. It assumes differences that are normally
    distributed, and covers the noise of training alone: all seeds share one split of
    the data.

    Args:
        values: One per seed; None where a run has not finished.
        base: What they are compared with, in the same order of seeds.
        comparisons: Intervals that hold together at 95 %, each of them at
            1 - 0.05 / comparisons (Bonferroni).

    Returns:
        The difference over seeds that both have; None if there are none.

    Raises:
        ValueError: If the lengths differ.
    """
    pairs = zip(values, base, strict=True)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    if not differences:
        return None
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return Difference(mean, None)
    deviation = statistics.stdev(differences)
    tail = (1 - CONFIDENCE) / 2 / comparisons
    quantile = float(student_t.isf(tail, len(differences) - 1))
    reach = quantile * deviation / math.sqrt(len(differences))
    return Difference(mean, (mean - reach, mean + reach))
