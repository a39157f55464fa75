"""The table of the study and what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from damex.moe import ExpertCapacity
from damex.studies.damex2023.exact import (
    drops_of_a_good_router,
    first_gate_weights,
    loss_gap,
    metadata_gap,
)
from damex.studies.damex2023.faults import Routing
from damex.studies.damex2023.measurements import Case, Faults
from damex.studies.damex2023.mixing import Outcome
from damex.studies.damex2023.model import Method
from damex.studies.result import Row

__all__ = ["conclusion", "exact_rows", "fault_rows", "mixing_rows"]

Outcomes = Mapping[Case, Sequence[Outcome]]
UNIFORM = 0.75  # of the largest entropy: the table is called near-uniform above it


def mixing_rows(outcomes: Outcomes) -> list[Row]:
    """Lemma 1 and the dispatch tables.

    Args:
        outcomes: By case.
    """
    rows = []
    for case, found in outcomes.items():
        label = _label(case)
        rows.append(_plain("test accuracy, %", label, [o.accuracy for o in found]))
        rows += _routing_rows(case, found, label)
    for shared in sorted({case.shared for case in outcomes}):
        rows += _lemma_rows(outcomes, shared=shared)
    return rows


def _routing_rows(case: Case, found: Sequence[Outcome], label: str) -> list[Row]:
    largest = math.log(case.num_datasets)
    entropy = [o.entropy for o in found]
    information = [o.information for o in found]
    if case.method == "vanilla":
        near = _mean(entropy) >= UNIFORM * largest
        criterion = f">= {UNIFORM:g} ln G = {UNIFORM * largest:.2f}"
        routing = []
    else:
        near, criterion = None, ""
        values = [o.routing for o in found]
        routing = [
            Row(
                "routed to an expert of the data set, %",
                "-",
                values,
                ">= 95",
                min(values) >= 95.0,
                label,
                1,
            )
        ]
    return [
        Row(
            "entropy of data sets in experts, nats",
            "near-uniform" if case.method == "vanilla" else "-",
            entropy,
            criterion,
            near,
            label,
        ),
        _plain("mutual information of data set and expert, nats", label, information),
        *routing,
    ]


def _lemma_rows(outcomes: Outcomes, *, shared: bool) -> list[Row]:
    vanilla = _cases(outcomes, "vanilla", shared=shared)
    most = vanilla[-1]
    damex = Case(shared, most.num_datasets, "damex")
    gain = [
        ours.accuracy - theirs.accuracy
        for ours, theirs in zip(outcomes[damex], outcomes[most], strict=True)
    ]
    fall = [
        few.accuracy - many.accuracy
        for few, many in zip(outcomes[vanilla[0]], outcomes[most], strict=True)
    ]
    where = _kind(shared=shared)
    return [
        Row(
            f"vanilla: accuracy at {vanilla[0].num_datasets} data sets minus at "
            f"{most.num_datasets}, points",
            "> 0 (Lemma 1)",
            fall,
            "> 0 for all seeds",
            min(fall) > 0.0,
            where,
            2,
        ),
        Row(
            f"DAMEX minus vanilla at {most.num_datasets} data sets, points",
            "> 0 (Lemma 1)",
            gain,
            "> 0 for all seeds",
            min(gain) > 0.0,
            where,
            2,
        ),
    ]


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
    weights = [weight for seed in seeds for weight in first_gate_weights(seed=seed)]
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
        _checked(
            "E times a gate weight at the start (smallest and largest by seed)",
            "router std 0.005",
            weights,
            "in [1, 1.25]",
            lambda value: 1.0 <= value <= 1.25,
        ),
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


def conclusion(outcomes: Outcomes, faults: Sequence[Faults]) -> str:
    """Says what was confirmed and what was not.

    Args:
        outcomes: By case.
        faults: One entry per seed.
    """
    parts = []
    for shared in sorted({case.shared for case in outcomes}):
        vanilla = _cases(outcomes, "vanilla", shared=shared)[-1]
        damex = Case(shared, vanilla.num_datasets, "damex")
        mean = {
            case: _mean([o.accuracy for o in outcomes[case]])
            for case in (vanilla, damex)
        }
        gain = [
            ours.accuracy - theirs.accuracy
            for ours, theirs in zip(outcomes[damex], outcomes[vanilla], strict=True)
        ]
        verdict = "is confirmed" if min(gain) > 0.0 else "is not confirmed"
        parts.append(
            f"DAMEX's gain over a vanilla MoE with the same parameters {verdict} where "
            f"{_kind(shared=shared)}: {mean[damex]:.1f} against {mean[vanilla]:.1f} % "
            f"at {vanilla.num_datasets} data sets"
        )
    wrong = _mean([fault.targets[2, True].accuracy for fault in faults])
    right = _mean([fault.targets[2, False].accuracy for fault in faults])
    dropped = _mean([fault.curves[True][-1][1] for fault in faults])
    collide = _mean([fault.labels[False, False] for fault in faults])
    return (
        "; ".join(parts) + ". Of the released code's faults, misaligned targets leave "
        f"{wrong:.0f} % of tokens with the right expert instead of {right:.0f} %, the "
        f"capacity drops {dropped:.0f} % of them, and colliding labels cap accuracy at "
        f"{collide:.0f} %."
    )


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


def _cases(outcomes: Outcomes, method: Method, *, shared: bool) -> list[Case]:
    """Cases of a method in rising number of data sets."""
    cases = [c for c in outcomes if c.shared == shared and c.method == method]
    return sorted(cases, key=lambda case: case.num_datasets)


def _kind(*, shared: bool) -> str:
    whose = "any data set" if shared else "the same data set"
    return f"disturbing signals come from {whose}"


def _label(case: Case) -> str:
    method = "DAMEX" if case.method == "damex" else "vanilla"
    return f"{method}, {case.num_datasets} data sets, {_kind(shared=case.shared)}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
