"""Rows of the mixtures (Lemma 1, and why it fails where it does) and of the faults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from studies.damex2023.faults import Routing
from studies.damex2023.mixing import Outcome
from studies.damex2023.plan import (
    ALONE,
    METHODS,
    Case,
    Faults,
    cases_with_more_experts,
    growing_cases,
)
from studies.report import Row, checked, differences, near

Outcomes = Mapping[Case, Sequence[Outcome]]
ONE_EXPERT, TOLERANCE = 87.5, 0.8  # per cent, as in the study of chen2022
UNIFORM = 0.75  # of the largest entropy: the table is called near-uniform above it


def mixing_rows(outcomes: Outcomes) -> list[Row]:
    """Lemma 1 and the dispatch tables, then what tells the reason."""
    kinds = sorted({case.shared for case in outcomes})
    usual = [
        case
        for shared in kinds
        for method in METHODS
        for case in growing_cases(outcomes, method, shared=shared)
    ]
    rows = []
    for case in sorted(usual, key=lambda case: (case.shared, case.num_datasets)):
        rows += _case_rows(case, outcomes[case], claims=True)
    for shared in kinds:
        rows += _lemma_rows(outcomes, shared=shared)
    for case, found in outcomes.items():
        if case == ALONE:
            rows.append(_alone_row(found))
        elif case not in usual:
            rows += _case_rows(case, found, claims=False)
    rows += [
        _gain_row(outcomes, case, claims=False)
        for case in cases_with_more_experts(outcomes, "damex")
    ]
    return rows


def _case_rows(case: Case, found: Sequence[Outcome], *, claims: bool) -> list[Row]:
    label = _label(case, usual=claims)
    rows = [
        Row("test accuracy, %", "-", [o.accuracy for o in found], "", None, label, 2),
        _entropy_row(case, found, label, claims=claims),
        Row(
            "mutual information of data set and expert, nats",
            "-",
            [o.information for o in found],
            settings=label,
            digits=2,
        ),
    ]
    if case.method == "damex":
        rows.append(_routing_row(found, label, claims=claims))
    return rows


def _entropy_row(
    case: Case, found: Sequence[Outcome], label: str, *, claims: bool
) -> Row:
    values = [o.entropy for o in found]
    name = "entropy of data sets in experts, nats"
    if case.method == "damex" or not claims:
        return Row(name, "-", values, settings=label)
    least = UNIFORM * math.log(case.num_datasets)
    criterion = f">= {UNIFORM:g} ln G = {least:.2f}"
    return Row(name, "near-uniform", values, criterion, fmean(values) >= least, label)


def _routing_row(found: Sequence[Outcome], label: str, *, claims: bool) -> Row:
    values = [o.routing for o in found]
    criterion, holds = (">= 95", min(values) >= 95.0) if claims else ("", None)
    name = "routed to an expert of the data set, %"
    return Row(name, "-", values, criterion, holds, label, 1)


def _lemma_rows(outcomes: Outcomes, *, shared: bool) -> list[Row]:
    vanilla = growing_cases(outcomes, "vanilla", shared=shared)
    least, most = vanilla[0], vanilla[-1]
    fall = [
        few.accuracy - many.accuracy
        for few, many in zip(outcomes[least], outcomes[most], strict=True)
    ]
    return [
        Row(
            f"vanilla: accuracy at {least.num_datasets} data sets minus at "
            f"{most.num_datasets}, points",
            "> 0 (Lemma 1)",
            fall,
            "> 0 for all seeds",
            min(fall) > 0.0,
            _kind(shared=shared),
            2,
        ),
        _gain_row(outcomes, replace(most, method="damex"), claims=True),
    ]


def _gain_row(outcomes: Outcomes, damex: Case, *, claims: bool) -> Row:
    values = _gains(outcomes, damex)
    where = _kind(shared=damex.shared)
    name = f"DAMEX minus vanilla at {damex.num_datasets} data sets, points"
    if not claims:
        where = f"{damex.num_experts} experts, {where}"
        return Row(name, "-", values, settings=where, digits=2)
    criterion, holds = "> 0 for all seeds", min(values) > 0.0
    return Row(name, "> 0 (Lemma 1)", values, criterion, holds, where, 2)


def _alone_row(found: Sequence[Outcome]) -> Row:
    """An expert that owns a data set is a single model: Theorem 4.1 binds it."""
    values = [o.accuracy for o in found]
    return Row(
        "test accuracy, %",
        f"<= {ONE_EXPERT} (Chen et al., Theorem 4.1)",
        values,
        f"<= {ONE_EXPERT} + {TOLERANCE}",
        max(values) <= ONE_EXPERT + TOLERANCE,
        f"one expert, one data set, {_kind(shared=ALONE.shared)}",
        2,
    )


def _gains(outcomes: Outcomes, damex: Case) -> list[float]:
    """DAMEX's accuracy minus that of a vanilla mixture with all else the same."""
    ours, theirs = (
        [outcome.accuracy for outcome in outcomes[case]]
        for case in (damex, replace(damex, method="vanilla"))
    )
    return differences(ours, theirs)


def _kind(*, shared: bool) -> str:
    whose = "any data set" if shared else "the same data set"
    return f"disturbing signals come from {whose}"


def _label(case: Case, *, usual: bool) -> str:
    parts = ["DAMEX" if case.method == "damex" else "vanilla"]
    parts.append(f"{case.num_datasets} data sets")
    if not usual:
        parts.append(f"{case.num_experts} experts")
    if case.longer > 1:
        parts.append(f"{case.longer} times the steps")
    return ", ".join([*parts, _kind(shared=case.shared)])


def fault_rows(faults: Sequence[Faults]) -> list[Row]:
    """Faults of the released code, each compared with its correction."""
    return [*_target_rows(faults), *_capacity_rows(faults), *_label_rows(faults)]


def _target_rows(faults: Sequence[Faults]) -> list[Row]:
    rows = []
    for number, released in faults[0].targets:
        found = [fault.targets[number, released] for fault in faults]
        whose = "released" if released else "our"
        where = f"{whose} layout, two images, {number} data sets"
        wrong = 50.0 if released else 0.0
        rows += [
            checked(
                "wrong routing targets, %",
                [routing.wrong_targets for routing in found],
                f"{wrong:g}",
                near(wrong, 1e-6),
                where,
                digits=1,
            ),
            _routing_accuracy(found, where, number, released=released),
            Row(
                "probability of the own expert, %",
                "-",
                [routing.confidence for routing in found],
                settings=where,
                digits=1,
            ),
        ]
    return rows


def _routing_accuracy(
    found: Sequence[Routing], where: str, number: int, *, released: bool
) -> Row:
    values = [routing.accuracy for routing in found]
    name = "routed to the expert of the data set, %"
    if not released:
        return checked(name, values, ">= 95", lambda x: x >= 95.0, where, digits=1)
    if number == 2:  # every target is a coin toss
        return checked(name, values, "<= 75", lambda x: x <= 75.0, where, digits=1)
    return Row(name, "-", values, settings=where, digits=1)


def _capacity_rows(faults: Sequence[Faults]) -> list[Row]:
    """What is dropped in the end, with the released capacity and without a limit."""
    name = "dropped tokens, 900 of one data set, %"
    limited, free = (
        [fault.curves[limit][-1][1] for fault in faults] for limit in (True, False)
    )
    published = "84.3 (by its arithmetic)"
    return [
        checked(
            name,
            limited,
            ">= 80",
            lambda x: x >= 80.0,
            "capacity 1.25, trained router",
            published=published,
            digits=1,
        ),
        checked(
            name,
            free,
            "0",
            lambda x: x <= 0.0,
            "dropless, trained router",
            digits=1,
        ),
    ]


def _label_rows(faults: Sequence[Faults]) -> list[Row]:
    rows = []
    name = "class accuracy, the same classes numbered differently, %"
    for by_name, marked in faults[0].labels:
        numbers = "labels by name" if by_name else "own numbers (released)"
        show = "show" if marked else "do not show"
        where = f"{numbers}, tokens {show} their data set"
        values = [fault.labels[by_name, marked] for fault in faults]
        if by_name:
            row = checked(name, values, ">= 95", lambda x: x >= 95.0, where, digits=1)
        elif not marked:
            row = checked(name, values, "50 +- 3", near(50.0, 3.0), where, digits=1)
        else:
            row = Row(name, "-", values, settings=where, digits=1)
        rows.append(row)
    return rows


def remark(outcomes: Outcomes, faults: Sequence[Faults]) -> str:
    """Whether DAMEX gains, and what the faults cost."""
    parts = []
    for shared in sorted({case.shared for case in outcomes}):
        damex = growing_cases(outcomes, "damex", shared=shared)[-1]
        holds = min(_gains(outcomes, damex)) > 0.0
        verdict = "is confirmed" if holds else "is not confirmed"
        parts.append(
            f"DAMEX's gain over a vanilla MoE with the same parameters {verdict} where "
            f"{_kind(shared=shared)}: {_against(outcomes, damex)} at "
            f"{damex.num_datasets} data sets and {damex.num_experts} experts"
        )
        parts += [
            f"with {case.num_experts} experts it is {_against(outcomes, case)}"
            for case in cases_with_more_experts(outcomes, "damex")
            if case.shared == shared
        ]
    wrong = fmean(fault.targets[2, True].accuracy for fault in faults)
    right = fmean(fault.targets[2, False].accuracy for fault in faults)
    dropped = fmean(fault.curves[True][-1][1] for fault in faults)
    collide = fmean(fault.labels[False, False] for fault in faults)
    return (
        "; ".join(parts) + ". Of the released code's faults, misaligned targets leave "
        f"{wrong:.0f} % of tokens with the right expert instead of {right:.0f} %, the "
        f"capacity drops {dropped:.0f} % of them, and colliding labels cap accuracy at "
        f"{collide:.0f} %."
    )


def _against(outcomes: Outcomes, damex: Case) -> str:
    ours, theirs = (
        fmean(o.accuracy for o in outcomes[case])
        for case in (damex, replace(damex, method="vanilla"))
    )
    return f"{ours:.1f} against {theirs:.1f} %"
