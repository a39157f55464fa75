"""Rows of the released code's faults, and of what holds exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from damex.moe import ExpertCapacity
from damex.studies.damex2023.exact import (
    drops_of_a_good_router,
    first_gate_weights,
    loss_gap,
    metadata_gap,
)
from damex.studies.damex2023.faults import Routing
from damex.studies.damex2023.measurements import Faults
from damex.studies.result import Row

__all__ = ["exact_rows", "fault_rows"]


def fault_rows(faults: Sequence[Faults]) -> list[Row]:
    """The released code's faults, each beside the mended way.

    Args:
        faults: One entry per seed.
    """
    return [*_target_rows(faults), *_capacity_rows(faults), *_label_rows(faults)]


def _target_rows(faults: Sequence[Faults]) -> list[Row]:
    rows = []
    for number, released in faults[0].targets:
        found = [fault.targets[number, released] for fault in faults]
        label = (
            f"{'released' if released else 'our'} layout, two images, "
            f"{number} data sets"
        )
        wrong = 50.0 if released else 0.0
        rows.append(
            _checked(
                "wrong routing targets, %",
                label,
                [routing.wrong_targets for routing in found],
                f"{wrong:g}",
                _close_to(wrong),
            )
        )
        rows.append(_routing_accuracy(found, label, number, released=released))
        rows.append(
            _plain(
                "probability of the own expert, %",
                label,
                [routing.confidence for routing in found],
                digits=1,
            )
        )
    return rows


def _routing_accuracy(
    found: Sequence[Routing], label: str, number: int, *, released: bool
) -> Row:
    values = [routing.accuracy for routing in found]
    name = "routed to the expert of the data set, %"
    if not released:
        return _checked(name, label, values, ">= 95", lambda value: value >= 95.0)
    if number == 2:  # every target is a coin toss
        return _checked(name, label, values, "<= 75", lambda value: value <= 75.0)
    return _plain(name, label, values, digits=1)


def _capacity_rows(faults: Sequence[Faults]) -> list[Row]:
    rows = []
    for limited in (True, False):
        values = [fault.curves[limited][-1][1] for fault in faults]
        label = f"{'capacity 1.25' if limited else 'dropless'}, trained router"
        rows.append(
            _checked(
                "dropped tokens, 900 of one data set, %",
                label,
                values,
                ">= 80" if limited else "0",
                (lambda value: value >= 80.0)
                if limited
                else (lambda value: value == 0.0),
                published="84.3 (by its arithmetic)" if limited else "-",
            )
        )
    return rows


def _label_rows(faults: Sequence[Faults]) -> list[Row]:
    wanted: Mapping[tuple[bool, bool], tuple[str, Callable[[float], bool]]] = {
        (False, False): ("50 +- 3", lambda value: abs(value - 50.0) <= 3.0),
        (True, False): (">= 95", lambda value: value >= 95.0),
        (True, True): (">= 95", lambda value: value >= 95.0),
    }
    rows = []
    for by_name, marked in faults[0].labels:
        label = (
            f"{'labels by name' if by_name else 'own numbers (released)'}, tokens "
            f"{'show' if marked else 'do not show'} their data set"
        )
        values = [fault.labels[by_name, marked] for fault in faults]
        name = "class accuracy, the same classes numbered differently, %"
        if (by_name, marked) in wanted:
            criterion, test = wanted[by_name, marked]
            rows.append(_checked(name, label, values, criterion, test))
        else:
            rows.append(_plain(name, label, values, digits=1))
    return rows


def exact_rows(seeds: Sequence[int]) -> list[Row]:
    """What has to hold exactly.

    Args:
        seeds: Of weights and tokens.
    """
    capacity = ExpertCapacity(factor=1.25)
    gaps = [loss_gap(seed=seed) for seed in seeds]
    rows = [
        Row(
            "loss minus cross-entropy, two images of two data sets",
            "0",
            gaps,
            "< 1e-6",
            max(gaps) < 1e-6,
            digits=8,
        ),
        _checked(
            "output with minus without data set ids in a test",
            "",
            [metadata_gap(seed=seed) for seed in seeds],
            "0",
            lambda value: value == 0.0,
        ),
        *_first_weight_rows(seeds),
    ]
    for tokens, limit, expected in (
        (900, capacity, 141),
        (1100, capacity, 172),
        (900, None, 900),
    ):
        served, rest = drops_of_a_good_router(tokens, capacity=limit)
        rows.append(
            Row(
                f"served of {tokens} tokens that go to one of 8 experts",
                str(expected) if limit else "-",
                [float(served)],
                f"= {expected}, others exactly 0",
                served == expected and rest == 0.0,
                "capacity 1.25" if limit else "dropless",
                0,
            )
        )
    return rows


def _first_weight_rows(seeds: Sequence[int]) -> list[Row]:
    """Gate weights before training: what a router of eight normal logits gives."""
    found = [first_gate_weights(seed=seed) for seed in seeds]
    means = [weights.mean for weights in found]
    expected = fmean(weights.expected for weights in found)
    extremes = [edge for one in found for edge in (one.smallest, one.largest)]
    return [
        Row(
            "E times the mean gate weight at the start",
            "-",
            means,
            f"mean within 0.005 of {expected:.3f} (eight normal logits)",
            abs(fmean(means) - expected) <= 0.005,
            "router std 0.005",
        ),
        Row(
            "E times a gate weight at the start (smallest and largest by seed)",
            "-",
            extremes,
            "in [0.9, 1.1]",
            min(extremes) >= 0.9 and max(extremes) <= 1.1,
            "router std 0.005",
        ),
    ]


def _checked(
    name: str,
    label: str,
    values: Sequence[float],
    criterion: str,
    test: Callable[[float], bool],
    *,
    published: str = "-",
) -> Row:
    """A row whose criterion has to hold for each seed."""
    holds = all(test(value) for value in values)
    return Row(name, published, values, criterion, holds, label, 1)


def _close_to(expected: float) -> Callable[[float], bool]:
    return lambda value: abs(value - expected) < 1e-6


def _plain(name: str, label: str, values: Sequence[float], *, digits: int = 2) -> Row:
    return Row(name, "-", values, settings=label, digits=digits)
