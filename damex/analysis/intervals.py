"""Statistics over seeds: mean, spread and paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import t as student_t

CONFIDENCE = 0.95


class Spread(NamedTuple):
    """Mean and sample standard deviation; no deviation for a single number."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        if self.deviation is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


class Difference(NamedTuple):
    """Mean of paired differences and its 95 % t-interval; no interval for one pair."""

    mean: float
    ci95: tuple[float, float] | None

    def __str__(self) -> str:
        if self.ci95 is None:
            return f"{self.mean:+.3f}"
        low, high = self.ci95
        return f"{self.mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and sample standard deviation of the values that are not None, if any."""
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
    """Mean difference of two methods over their common seeds; None without any.

    Seeds that are easy or hard for both cancel, so that the interval is narrower than
    the two spreads suggest. It assumes normally distributed differences and covers
    training noise only: all seeds share one split of the data.

    Args:
        values: One per seed; None if a run has not finished.
        base: The baseline, in the same order of seeds.
        comparisons: Number of intervals that hold jointly at 95 %, each at 1 - 0.05 /
            comparisons (Bonferroni).
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
