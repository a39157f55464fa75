"""What the study says in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from damex.studies.damex2023.cases import (
    Case,
    cases_with_more_experts,
    growing_cases,
)
from damex.studies.damex2023.measurements import Faults
from damex.studies.damex2023.mixing_rows import Outcomes, gains, kind

__all__ = ["conclusion"]


def conclusion(outcomes: Outcomes, faults: Sequence[Faults]) -> str:
    """Says what was confirmed and what was not.

    Args:
        outcomes: By case.
        faults: One entry per seed.
    """
    parts = []
    for shared in sorted({case.shared for case in outcomes}):
        damex = growing_cases(outcomes, "damex", shared=shared)[-1]
        holds = min(gains(outcomes, damex)) > 0.0
        verdict = "is confirmed" if holds else "is not confirmed"
        parts.append(
            f"DAMEX's gain over a vanilla MoE with the same parameters {verdict} where "
            f"{kind(shared=shared)}: {_against(outcomes, damex)} at "
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
