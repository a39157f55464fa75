"""Convergence rates of softmax gating (Nguyen, Ho and Rinaldo 2025, arXiv 2503.03213).

The paper has theorems and no experiment. Here its regression functions are layers of
damex.moe, fitted by least squares to samples of a known mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from damex.studies.progress import StudyProgress
from damex.studies.result import StudyResult, StudySettings
from damex.studies.softmax_gating2025.cases import CASES, Case
from damex.studies.softmax_gating2025.figure import rates_figure
from damex.studies.softmax_gating2025.simulation import BOUND, SPREAD, Plan, simulate
from damex.studies.softmax_gating2025.tables import (
    Found,
    conclusion,
    identity_rows,
    rate_rows,
    start_rows,
    stuck_row,
)

__all__ = ["QUICK_CASES", "STARTS", "plan_of", "run"]

TITLE = "Convergence rates of softmax gating (Nguyen et al. 2025, arXiv 2503.03213)"
# n in steps of half a decade.
SIZES = (1_000, 3_162, 10_000, 31_623, 100_000, 316_228, 1_000_000)
# Rates are statements about large n. Where there are too many experts they show late;
# a fit costs the same at any n.
LATE_SIZES = (10**7, 10**8, 10**9, 10**10)
EXACT = Plan(SIZES, repetitions=32)
# Valleys are flat where there are too many experts: longer descents, fewer samples.
OVER = Plan(SIZES, repetitions=12, steps=600)
LATE_STEPS = 1000
QUICK = Plan(SIZES[::2], repetitions=24, steps=120, points=31)
QUICK_CASES = (
    "tanh, exact",
    "linear, exact",
    "temperature, linear router",
    "temperature, tanh router",
)
# Where fits from near and far starts must agree, and where they must not.
STARTS = ("tanh, over", "linear, over")
FAR = 2.0
MANY_STARTS = 8
# Where the parameters have to stay away from the truth.
STUCK = ("linear, over", "linear, over, copies start apart")


def run(settings: StudySettings, progress: StudyProgress) -> StudyResult:
    """Fits all cases and compares the slopes with the theorems.

    Args:
        settings: The quick run has a few cases with a known number of experts.
        progress: Where to show how far it is.
    """
    default = 2 if settings.quick else 5
    seeds = range(settings.seeds if settings.seeds is not None else default)
    names = QUICK_CASES if settings.quick else tuple(CASES)
    plans = {name: plan_of(CASES[name], quick=settings.quick) for name in names}
    found = _fit(plans, seeds, progress)
    sizes = plans[names[0]].sizes
    rows = identity_rows(seeds)
    for name in names:
        rows += rate_rows(CASES[name], sizes, found[name])
    curves = {name: (sizes, one) for name, one in found.items()}
    if not settings.quick:
        late = {
            name: replace(plans[name], sizes=LATE_SIZES, steps=LATE_STEPS)
            for name in names
            if CASES[name].over and not CASES[name].linear
        }
        for name, one in _fit(late, seeds, progress).items():
            where = f"{name}, n = {LATE_SIZES[0]:.0e} to {LATE_SIZES[-1]:.0e}"
            rows += rate_rows(CASES[name], LATE_SIZES, one, where=where)
            curves[name] = ((*sizes, *LATE_SIZES), _join(found[name], one))
        for starts in (plans[STARTS[0]].starts, MANY_STARTS):
            near = {
                name: replace(plans[name], sizes=sizes[-1:], starts=starts)
                for name in STARTS
            }
            far = {name: replace(plan, apart=FAR) for name, plan in near.items()}
            rows += start_rows(
                _fit(near, seeds, progress),
                _fit(far, seeds, progress),
                STARTS,
                num_starts=starts,
            )
        rows += [stuck_row(name, sizes, found[name]) for name in STUCK]
    return StudyResult(
        title=TITLE,
        rows=rows,
        conclusion=conclusion(rows),
        figure=rates_figure(curves),
        settings=_facts(plans),
    )


def plan_of(case: Case, *, quick: bool = False) -> Plan:
    """How much is simulated of a case.

    Args:
        case: The case.
        quick: Whether it is only to be seen to work.
    """
    if quick:
        return QUICK
    plan = OVER if case.over else EXACT
    # With one way to write it, and many local minima.
    return replace(plan, starts=6) if case.gating == "hierarchical" else plan


def _fit(
    plans: Mapping[str, Plan], seeds: Sequence[int], progress: StudyProgress
) -> dict[str, Found]:
    jobs = [(name, seed) for name in plans for seed in seeds]
    found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in plans}
    for name, seed in progress.track(jobs, "fits"):
        found[name].append(simulate(CASES[name], plans[name], seed=seed))
    return dict(found)


def _join(early: Found, late: Found) -> Found:
    """Errors at all sample sizes, seed by seed."""
    return [
        {name: torch.cat([one[name], other[name]]) for name in one}
        for one, other in zip(early, late, strict=True)
    ]


def _facts(plans: Mapping[str, Plan]) -> dict[str, str]:
    plan = next(iter(plans.values()))
    starts = " or ".join(map(str, sorted({plan.starts for plan in plans.values()})))
    repetitions = sorted({plan.repetitions for plan in plans.values()})
    return dict(
        n=f"{plan.sizes[0]} to {plan.sizes[-1]} unless the row says otherwise",
        repetitions=" or ".join(map(str, repetitions)) + " per n and seed",
        inputs=f"{plan.points} equally likely points in [-2, 2]",
        box=f"[-{BOUND:g}, {BOUND:g}]",
        starts=f"{starts} at truth + N(0, {SPREAD}^2) for each split",
    )
