"""The verdict of ``damex headroom``, and the paired differences that it rests on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from scipy.stats import t as student_t

Scores = Sequence[float | None]  # one per seed, None if a run has not finished
CONFIDENCE = 0.95

# The conclusion from each baseline above the dense detector.
CAUSES: Mapping[str, str] = {
    "wide_decoder": "capacity: wider FFNs in the decoder help",
    "wide_encoder": "capacity: wider FFNs in the encoder help",
    "single": "interference: datasets do better with separate detectors",
    "oracle": "routing: experts that know the dataset help",
}
NO_VERDICT = f"No verdict: it needs a seed of dense and of one of {', '.join(CAUSES)}."

# Threshold for one seed, without an interval: deviations over seeds are 0.004 to 0.036
# (docs/results/all-mixtures.md). A larger difference whose interval contains 0 is open.
MIN_GAIN = 0.02
GUESS = " (a guess from a single seed)"

OPENINGS: Mapping[str, str] = {
    "yes": "Experts can help",
    "no": "Experts are not shown to help",
    "undecided": "Whether experts will help is undecided",
}


class Spread(NamedTuple):
    """Mean and sample standard deviation; no deviation for a single number."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        if self.deviation is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


class Difference(NamedTuple):
    """Mean of paired differences and its 95% t-interval; no interval for one pair."""

    mean: float
    ci95: tuple[float, float] | None

    def __str__(self) -> str:
        if self.ci95 is None:
            return f"{self.mean:+.3f}"
        low, high = self.ci95
        return f"{self.mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def spread(values: Scores) -> Spread | None:
    """Mean and sample standard deviation of the values that are not None, if any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    deviation = statistics.stdev(known) if known[1:] else None
    return Spread(statistics.fmean(known), deviation)


def paired_difference(
    values: Scores | None, base: Scores | None, *, comparisons: int = 1
) -> Difference | None:
    """Mean difference of two methods over their common seeds; None without any.

    Seeds that are easy or hard for both cancel, so that the interval is narrower than
    the two spreads suggest. It assumes normally distributed differences and covers
    training noise only: all seeds share one split of the data. As many intervals as
    ``comparisons`` hold jointly at 95%, each at 1 - 0.05 / comparisons (Bonferroni).
    """
    if values is None or base is None:
        return None
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


@dataclass(frozen=True)
class Verdict:
    """Whether there is any headroom for experts."""

    # ``undecided`` if a difference is large, or its uncorrected interval above 0.
    answer: str
    is_guess: bool  # there is a single seed, and so no interval
    reference: str  # the better one of ``dense`` and ``dense_lr2``
    above: tuple[str, ...]  # baselines above it
    open: tuple[str, ...]  # baselines that more seeds might show to be above it
    differences: Mapping[str, Difference]  # mean AP of each minus that of the reference
    learning_speed: Difference | None  # gain of twice the learning rate alone

    def __str__(self) -> str:
        guess = GUESS if self.is_guess else ""
        count = len(self.differences)
        level = f" (family-wise level 5%: Holm, {count} comparisons)"
        level = "" if self.is_guess or count == 1 else level
        against = f"{self.reference} in mean AP"
        named = {name: f"{name} {one}" for name, one in self.differences.items()}
        if self.answer == "yes":
            reasons = (f"{named[name]} ({CAUSES[name]})" for name in self.above)
            why = f"above {against}{level} by {'; '.join(reasons)}."
        elif self.answer == "no":
            found = ", ".join(named.values())
            why = f"nothing that they could draw on is above {against}{level}: {found}."
        else:
            found = ", ".join(named[name] for name in self.open)
            why = (
                f"above {against} by {found}, which may be chance{level}; more seeds "
                "would tell."
            )
        text = f"{OPENINGS[self.answer]}{guess}: {why}"
        if self.reference == "dense" or self.learning_speed is None:
            return text
        meaning = ", which is within the noise."
        if is_above(self.learning_speed):
            meaning = ": some of what experts win over dense would be learning speed."
        speed = f"{self.learning_speed} over dense{meaning}"
        return f"{text} Twice the learning rate alone gives {speed}"


def best_dense(mean_ap: Mapping[str, Scores]) -> tuple[str, Difference | None]:
    """Return the better one of ``dense`` and ``dense_lr2``, and the gain of the latter.

    Under Adam experts may merely learn faster, which needs no experts.
    """
    speed = paired_difference(mean_ap.get("dense_lr2"), mean_ap.get("dense"))
    return "dense_lr2" if speed is not None and speed.mean > 0.0 else "dense", speed


def decide(mean_ap: Mapping[str, Scores]) -> Verdict | None:
    """Decide whether a baseline that experts can draw on is above the dense detector.

    Above: the lower end of the 95% interval of the paired difference in mean AP is
    above 0, with Holm's correction over all measured ones (Scand. J. Statist. 1979);
    for a single seed, the difference is above :data:`MIN_GAIN`. See `best_dense`. None
    without a reference, or with controls only.
    """
    reference, speed = best_dense(mean_ap)
    gain = partial(paired_difference, base=mean_ap.get(reference))
    found = {name: gain(mean_ap.get(name)) for name in CAUSES}
    differences = {name: one for name, one in found.items() if one is not None}
    if not differences:
        return None
    # Holm: intervals are as wide as for all that are not yet found to be above.
    rest, count = [*differences], 0
    while len(rest) != count:
        count = len(rest)
        rest = [n for n in rest if not is_above(gain(mean_ap[n], comparisons=count))]
    still_open = tuple(
        name
        for name in rest
        if differences[name].mean > MIN_GAIN or is_above(differences[name])
    )
    above = tuple(name for name in differences if name not in rest)
    return Verdict(
        answer="yes" if above else "undecided" if still_open else "no",
        is_guess=any(one.ci95 is None for one in differences.values()),
        reference=reference,
        above=above,
        open=still_open,
        differences=differences,
        learning_speed=speed,
    )


def best_head(mean_ap: Mapping[str, Scores]) -> str:
    """Return the sentence that a head per dataset is best; empty if it is not.

    ``partitioned`` needs no router, so a reader should know of it before any expert. It
    is best if it gains over the better dense baseline and no other training is above it
    in the mean over common seeds.
    """
    own, (reference, _) = mean_ap.get("partitioned"), best_dense(mean_ap)
    gain = paired_difference(own, mean_ap.get(reference))
    leads = (paired_difference(own, other) for other in mean_ap.values())
    if gain is None or not is_above(gain) or any(one and one.mean < 0 for one in leads):
        return ""
    guess = GUESS if gain.ci95 is None else ""
    found = f"partitioned {gain} over {reference} in mean AP"
    return f"A head per dataset is best{guess}: {found}. "


def is_above(difference: Difference | None) -> bool:
    """Return whether a paired difference alone is a gain, without correction."""
    if difference is None:
        return False
    if difference.ci95 is None:
        return difference.mean > MIN_GAIN
    return difference.ci95[0] > 0.0
