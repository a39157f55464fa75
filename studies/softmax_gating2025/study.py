"""Convergence rates of softmax gating (Nguyen, Ho and Rinaldo 2025, arXiv 2503.03213).

The paper has theorems and no experiment. Here its regression functions are layers of
damex.moe, fitted by least squares to samples of a known mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from studies.harness import Session
from studies.report import Row, StudyResult
from studies.softmax_gating2025.cases import (
    CASES,
    WORST,
    Case,
    median_curve,
    slope,
)
from studies.softmax_gating2025.identities import identity_rows
from studies.softmax_gating2025.simulation import BOUND, SPREAD, Plan, simulate

# For each seed: quantity -> (sizes, repetitions).
Found = Sequence[Mapping[str, Tensor]]
Curves = dict[str, tuple[Sequence[int], Found]]  # with the sample sizes of each case
COLUMNS = 2
STYLES = ("o-", "s-", "^-", "d-", "v-", "P-")
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
STUCK_SIZE = 31_623
STUCK = ("linear, over", "linear, over, copies start apart")


def run(session: Session) -> StudyResult:
    """Fit all cases and compare the slopes with the theorems."""
    seeds = session.seed_range(2 if session.quick else 5)
    names = QUICK_CASES if session.quick else tuple(CASES)
    plans = {name: plan_of(CASES[name], quick=session.quick) for name in names}
    found = _fit(plans, seeds, session)
    sizes = plans[names[0]].sizes
    rows = identity_rows(seeds)
    for name in names:
        rows += _rate_rows(CASES[name], sizes, found[name])
    curves: Curves = {name: (sizes, one) for name, one in found.items()}
    if not session.quick:
        for name, one in _fit(_late(plans), seeds, session).items():
            where = f"{name}, n = {LATE_SIZES[0]:.0e} to {LATE_SIZES[-1]:.0e}"
            rows += _rate_rows(CASES[name], LATE_SIZES, one, where=where)
            curves[name] = ((*sizes, *LATE_SIZES), _join(found[name], one))
        for starts in (plans[STARTS[0]].starts, MANY_STARTS):
            near = {
                name: replace(plans[name], sizes=sizes[-1:], starts=starts)
                for name in STARTS
            }
            far = {name: replace(plan, apart=FAR) for name, plan in near.items()}
            here, there = (_fit(some, seeds, session) for some in (near, far))
            rows += start_rows(here, there, STARTS, num_starts=starts)
        rows += [stuck_row(name, sizes, found[name]) for name in STUCK]
    return StudyResult(
        title=TITLE,
        rows=rows,
        figure=_figure(curves),
        settings=_facts(plans),
        remark=remark(rows),
    )


def _late(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Larger samples for the cases whose rates show late."""
    return {
        name: replace(plan, sizes=LATE_SIZES, steps=LATE_STEPS)
        for name, plan in plans.items()
        if CASES[name].over and not CASES[name].linear
    }


def plan_of(case: Case, *, quick: bool = False) -> Plan:
    """How much is simulated of a case."""
    if quick:
        return QUICK
    plan = OVER if case.over else EXACT
    # With one way to write it, and many local minima.
    return replace(plan, starts=6) if case.gating == "hierarchical" else plan


def _fit(
    plans: Mapping[str, Plan], seeds: Sequence[int], session: Session
) -> dict[str, list[dict[str, Tensor]]]:
    def fit(name: str, seed: int) -> dict[str, Tensor]:
        return simulate(CASES[name], plans[name], seed=seed)

    jobs = [(name, seed) for name in plans for seed in seeds]
    return session.run(jobs, fit, "fits")


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
        n=f"{plan.sizes[0]} to {plan.sizes[-1]} unless stated in the row",
        repetitions=" or ".join(map(str, repetitions)) + " per n and seed",
        inputs=f"{plan.points} equally likely points in [-2, 2]",
        box=f"[-{BOUND:g}, {BOUND:g}]",
        starts=f"{starts} at truth + N(0, {SPREAD}^2) for each split",
    )


def _rate_rows(
    case: Case, sizes: Sequence[int], found: Found, *, where: str | None = None
) -> list[Row]:
    """Slopes of one case compared with the theory."""
    rows = []
    for claim in case.claims:
        slopes = [slope(sizes, median_curve(one[claim.quantity])) for one in found]
        criterion, holds = claim.judge(slopes)
        rows.append(
            Row(
                f"exponent of n, {claim.label}",
                claim.published,
                slopes,
                criterion,
                holds,
                where or case.name,
                2,
            )
        )
    return rows


def start_rows(
    near: Mapping[str, Found],
    far: Mapping[str, Found],
    case_names: Sequence[str],
    *,
    num_starts: int,
) -> list[Row]:
    """Whether the fit depends on where its copies of an expert started.

    Errors at one sample size: `near` of copies starting together, `far` of the same
    samples with copies starting apart. In the first case they must agree, in the second
    they must not.
    """
    published = ("one limit", "no limit: merged experts fit as well")
    rows = []
    for name, claim, linear in zip(case_names, published, (False, True), strict=True):
        ratios = [
            _median(there["over"]) / _median(here["over"])
            for here, there in zip(near[name], far[name], strict=True)
        ]
        gains = [
            _median(there["cost"] - here["cost"])
            for here, there in zip(near[name], far[name], strict=True)
        ]
        mean = float(np.mean(ratios))
        where = f"{name}, {num_starts} starts for each split"
        rows.append(
            Row(
                "error of the cell of several atoms, far / near starts",
                claim,
                ratios,
                ">= 1.5" if linear else "in [0.67, 1.5]",
                mean >= 1.5 if linear else 0.67 <= mean <= 1.5,
                where,
                2,
            )
        )
        rows.append(
            Row(
                "chi-square of far - near starts",
                "-",
                gains,
                "|mean| <= 2, so neither fits better" if linear else "",
                abs(float(np.mean(gains))) <= 2 if linear else None,
                where,
                2,
            )
        )
    return rows


def stuck_row(name: str, sizes: Sequence[int], found: Found) -> Row:
    """Error of the merged cell of linear experts at a small error of the function."""
    place = list(sizes).index(STUCK_SIZE)
    values = [float(median_curve(one["over"])[place]) for one in found]
    return Row(
        f"error of the cell of several atoms at n = {STUCK_SIZE}",
        "does not fall as a power of n (Theorem 2)",
        values,
        "> 0.3 in every seed",
        min(values) > 0.3,
        name,
    )


def remark(rows: Sequence[Row]) -> str:
    """What a fixed truth shows where the theorems bound the worst one."""
    fixed = ", ".join(
        f"{row.mean:.2f} ({row.settings}: {row.name.rpartition(', ')[2]})"
        for row in rows
        if WORST in row.published
    )
    if not fixed:
        return ""
    return (
        f"Theorems 2, 3 and 6 bound the {WORST}, which no fixed truth can show; "
        f"at ours the exponents of n are {fixed}."
    )


def _median(values: Tensor) -> float:
    return float(values.nanmedian())


def _figure(curves: Curves) -> Figure:
    """Medians over repetitions and seeds."""
    rows = ceil(len(curves) / COLUMNS)
    figure = Figure(figsize=(5.4 * COLUMNS, 3.4 * rows), layout="constrained")
    for place, (name, (sizes, seeds)) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(rows, COLUMNS, place)
        _panel(axes, name, sizes, seeds)
    return figure


def _panel(axes: Axes, name: str, sizes: Sequence[int], seeds: Found) -> None:
    for style, claim in zip(STYLES, CASES[name].claims, strict=False):
        curves = [median_curve(seed[claim.quantity]) for seed in seeds]
        axes.loglog(sizes, np.median(curves, axis=0), style, ms=4, label=claim.label)
    low, high = axes.get_ylim()
    n = np.asarray(sizes, dtype=float)
    middle = np.sqrt(low * high)
    for power, style in ((-0.5, "--"), (-0.25, ":")):
        guide = middle * (n / np.sqrt(n[0] * n[-1])) ** power
        axes.loglog(n, guide, style, color="gray", label=f"slope {power:g}")
    axes.set_title(f"{name} ({CASES[name].loss})", fontsize=10)
    axes.set_xlabel("sample size n (observations)")
    axes.set_ylabel("median error (units of parameter or Y)")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
