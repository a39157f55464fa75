"""Scores of the JSON files here by arm, and Welch's test of two arms."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scipy.optimize import brentq
from scipy.stats import t as student_t

from damex.workbench.headroom.verdict import spread

HERE = Path(__file__).parent
MARGIN = 0.01  # within it, an interval means "equal"
FEWEST_SEEDS = 5

Arms = Mapping[str, Mapping[str, Any]]


def stored(file: str) -> Any:
    """The content of a JSON file next to this one."""
    return json.loads((HERE / file).read_text("utf-8"))


def arms_of(file: str) -> Arms:
    """Scores by arm, of a file of runs: a list with a number per seed."""
    arms: dict[str, dict[str, Any]] = {}
    for run in stored(f"{file}.json")["runs"]:
        arm = arms.setdefault(run["arm"], {"datasets": {}, "datasets_ap50": {}})
        for key, score in run.items():
            if isinstance(score, float):  # but not the seed, nor a gap
                arm.setdefault(key, []).append(score)
        for key in ("datasets", "datasets_ap50"):  # older runs lack the second
            for name, score in run.get(key, {}).items():
                arm[key].setdefault(name, []).append(score)
    return arms


def mean(arm: Mapping[str, Any], score: str = "mean_ap") -> str:
    """Mean and deviation, ``-`` without scores."""
    return str(spread(arm[score])) if score in arm else "-"


def moments(arm: Mapping[str, Any]) -> tuple[float, float, int]:
    """Mean, deviation and number of seeds; the deviation of a single seed is nan."""
    scores = arm["mean_ap"]
    deviation = statistics.stdev(scores) if scores[1:] else math.nan
    return statistics.fmean(scores), deviation, len(scores)


def contrast(
    *parts: tuple[float, tuple[float, float, int]],
) -> tuple[float, float, float]:
    """Weighted sum of means, half of Welch's 95% interval, and its p-value.

    The last two are nan if one of the means is of a single seed.
    """
    total = sum(weight * one[0] for weight, one in parts)
    variances = [(weight * one[1]) ** 2 / one[2] for weight, one in parts]
    if math.isnan(sum(variances)):
        return total, math.nan, math.nan
    counts = [count for _, (_, _, count) in parts]
    terms = (v**2 / (n - 1) for v, n in zip(variances, counts, strict=True))
    freedom, error = sum(variances) ** 2 / sum(terms), math.sqrt(sum(variances))
    reach = float(student_t.isf(0.025, freedom)) * error
    return total, reach, 2 * float(student_t.sf(abs(total) / error, freedom))


def welch(
    of: tuple[float, float, int], base: tuple[float, float, int]
) -> tuple[str, float | None, str]:
    """Difference of means with Welch's 95% interval; its p-value, and its place.

    The place is ``few seeds``; or ``equal`` if the interval lies within ±`MARGIN`; else
    ``open``, which a test over all arms may turn into ``above`` or ``below``.
    """
    gain, reach, p_value = contrast((1.0, of), (-1.0, base))
    if math.isnan(reach):
        return f"{gain:+.3f}", None, "-"
    low, high = gain - reach, gain + reach
    place = "equal" if low >= -MARGIN and high <= MARGIN else "open"
    place = "few seeds" if min(of[2], base[2]) < FEWEST_SEEDS else place
    return f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]", p_value, place


def gain(arms: Arms, name: str, base: str) -> str:
    """Difference in mean AP of two arms, ``-`` for the base or without scores."""
    return "-" if name == base or name not in arms else difference(arms, name, base)[0]


def difference(arms: Arms, name: str, base: str) -> tuple[str, float | None, str]:
    """Welch's test of two arms."""
    return welch(moments(arms[name]), moments(arms[base]))


def share_of_gap(arms: Arms, name: str, base: str, best: str) -> str:
    """How much of the gap between two arms another closes, with its 95% interval.

    The interval is Fieller's, of all shares that Welch's test does not reject: a ratio
    of differences has no deviation of its own. ``-`` with a single seed.
    """
    of, low, high = (moments(arms[one]) for one in (name, base, best))

    def rejects(share: float) -> float:
        """Above 0 if ``name`` is not at that share, by Welch's test."""
        total, reach, _ = contrast((1.0, of), (share - 1, low), (-share, high))
        return abs(total) - reach

    if name in (base, best) or min(of[2], low[2], high[2]) == 1:
        return "-"
    middle = (of[0] - low[0]) / (high[0] - low[0])
    if min(rejects(middle - 2), rejects(middle + 2)) <= 0:
        return f"{middle:.0%}"  # the gap itself may be 0
    ends = [brentq(rejects, middle, middle + side) for side in (-2, 2)]
    return f"{middle:.0%} [{ends[0]:.0%}, {ends[1]:.0%}]"


def verdicts(arms: Arms, base: str) -> dict[str, str]:
    """Place of each arm relative to the base, with Holm's correction over the arms."""
    tests = {name: difference(arms, name, base) for name in arms if name != base}
    places = {name: place for name, (_, _, place) in tests.items()}
    ranked = sorted(
        (p, name) for name, (_, p, place) in tests.items() if place == "open" and p
    )
    for rank, (p, name) in enumerate(ranked):
        if p * (len(tests) - rank) >= 0.05:
            break
        places[name] = "above" if tests[name][0].startswith("+") else "below"
    return places
