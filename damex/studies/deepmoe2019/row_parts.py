"""What the rows are made of: values of a network, and rows with and without a claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from damex.studies.deepmoe2019.measurements import Case, Measured
from damex.studies.result import Row

__all__ = [
    "CHOSEN",
    "HALF",
    "PLAIN",
    "THIN",
    "Found",
    "accuracy_of",
    "active_of",
    "at_least",
    "below",
    "checked",
    "differences",
    "gated_networks",
    "left_of",
    "patterns_of",
    "sweep_cases",
    "told",
]

Found = Mapping[Case, Sequence[Measured]]
PLAIN: Case = ("plain", "32")
HALF: Case = ("plain", "16")
THIN: Case = ("plain", "5")
CHOSEN: Case = ("sweep", "0.001")


def accuracy_of(one: Measured) -> float:
    """Test accuracy after stage 2, in percent."""
    return one.final.accuracy


def active_of(one: Measured) -> float:
    """Open channels, in percent."""
    return one.final.active


def patterns_of(one: Measured) -> float:
    """Different sets of open channels among the test images."""
    return float(one.final.patterns)


def left_of(one: Measured) -> float:
    """Operations that skipping leaves, the gating path's included, in percent."""
    return 100.0 * one.flops / one.dense_flops


def sweep_cases(found: Found) -> list[Case]:
    """The cases that differ in lambda, in rising order."""
    return sorted(
        (case for case in found if case[0] == "sweep"), key=lambda case: float(case[1])
    )


def gated_networks(found: Found) -> list[Measured]:
    """All networks that have gates."""
    return [one for case in found if "plain" not in case for one in found[case]]


def told(
    name: str,
    label: str,
    networks: Sequence[Measured],
    value: Callable[[Measured], float],
    *,
    digits: int = 2,
) -> Row:
    """A row of which nothing is claimed.

    Args:
        name: What is measured.
        label: Of which networks.
        networks: One per seed.
        value: What is measured of a network.
        digits: Decimals to print.
    """
    values = [value(one) for one in networks]
    return Row(name, "-", values, settings=label, digits=digits)


def checked(
    name: str,
    label: str,
    networks: Sequence[Measured],
    value: Callable[[Measured], float],
    criterion: str,
    test: Callable[[float], bool],
    *,
    published: str = "-",
    digits: int = 2,
) -> Row:
    """A row whose criterion has to hold for each network.

    Args:
        name: What is measured.
        label: Of which networks.
        networks: One per seed.
        value: What is measured of a network.
        criterion: In words.
        test: The same for one value.
        published: The value of the paper.
        digits: Decimals to print.
    """
    values = [value(one) for one in networks]
    holds = all(test(one) for one in values)
    return Row(name, published, values, criterion, holds, label, digits)


def differences(
    first: Sequence[Measured],
    second: Sequence[Measured],
    value: Callable[[Measured], float],
) -> list[float]:
    """What the first networks have more than the second, seed by seed."""
    return [value(one) - value(other) for one, other in zip(first, second, strict=True)]


def below(limit: float) -> Callable[[float], bool]:
    """A test for `checked`."""
    return lambda value: value < limit


def at_least(limit: float) -> Callable[[float], bool]:
    """A test for `checked`."""
    return lambda value: value >= limit
