"""Rows of the mixtures: Lemma 1, and why it fails where it does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from damex.studies.damex2023.cases import (
    ALONE,
    METHODS,
    Case,
    cases_with_more_experts,
    growing_cases,
)
from damex.studies.damex2023.mixing import Outcome
from damex.studies.result import Row

__all__ = ["Outcomes", "gains", "kind", "mixing_rows"]

Outcomes = Mapping[Case, Sequence[Outcome]]
ONE_EXPERT, TOLERANCE = 87.5, 0.8  # per cent, as in the study of chen2022
UNIFORM = 0.75  # of the largest entropy: the table is called near-uniform above it


def mixing_rows(outcomes: Outcomes) -> list[Row]:
    """Lemma 1 and the dispatch tables, then what tells the reason.

    Args:
        outcomes: By case.
    """
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


def gains(outcomes: Outcomes, damex: Case) -> list[float]:
    """DAMEX's accuracy minus the vanilla mixture's, in points, seed by seed.

    Args:
        outcomes: By case.
        damex: The case; the vanilla one is that with all else the same.
    """
    vanilla = outcomes[replace(damex, method="vanilla")]
    return [
        ours.accuracy - theirs.accuracy
        for ours, theirs in zip(outcomes[damex], vanilla, strict=True)
    ]


def kind(*, shared: bool) -> str:
    """Names a kind of mixture.

    Args:
        shared: See `draw_mixture`.
    """
    whose = "any data set" if shared else "the same data set"
    return f"disturbing signals come from {whose}"


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
            kind(shared=shared),
            2,
        ),
        _gain_row(outcomes, replace(most, method="damex"), claims=True),
    ]


def _gain_row(outcomes: Outcomes, damex: Case, *, claims: bool) -> Row:
    values = gains(outcomes, damex)
    where = kind(shared=damex.shared)
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
        f"one expert, one data set, {kind(shared=ALONE.shared)}",
        2,
    )


def _label(case: Case, *, usual: bool) -> str:
    parts = ["DAMEX" if case.method == "damex" else "vanilla"]
    parts.append(f"{case.num_datasets} data sets")
    if not usual:
        parts.append(f"{case.num_experts} experts")
    if case.longer > 1:
        parts.append(f"{case.longer} times the steps")
    return ", ".join([*parts, kind(shared=case.shared)])
