"""Rows of the report: identities, slopes and what decides a flat fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from damex.studies.result import Row
from damex.studies.softmax_gating2025 import identities
from damex.studies.softmax_gating2025.cases import Case
from damex.studies.softmax_gating2025.claims import CLAIMS, WORST
from damex.studies.softmax_gating2025.rates import median_curve, slope

__all__ = [
    "Found",
    "conclusion",
    "identity_rows",
    "rate_rows",
    "start_rows",
    "stuck_row",
]

# For each seed: quantity -> (sizes, repetitions).
Found = Sequence[Mapping[str, Tensor]]

ROUNDING = 1e-12
APART = 1.0
FACTOR = 1.7
STUCK_SIZE = 31_623


def identity_rows(seeds: Sequence[int]) -> list[Row]:
    """The equations behind the theorems, by autograd in float64.

    Args:
        seeds: Of the parameters at which they are checked.
    """
    linear = [identities.linear_residual("identity", seed=seed) for seed in seeds]
    rows = [_zero("eq. 9, linear experts", linear)]
    rows.append(
        _broken(
            "eq. 9, tanh experts of the normalised input",
            [
                identities.linear_residual("tanh", seed=seed, normalised=True)
                for seed in seeds
            ],
        )
    )
    plain = [identities.linear_residual("tanh", seed=seed) for seed in seeds]
    rows.append(
        Row(
            "eq. 9, tanh experts of the plain input, residual",
            "x dh/db = dh/da, so Definition 1 fails",
            plain,
            settings="not in the paper, which takes a transformed input",
            digits=16,
        )
    )
    for level in ("first", "second"):
        residuals = [identities.group_residual(level, seed=seed) for seed in seeds]
        rows.append(_zero(f"eq. 28, {level} level", residuals))
    linear, tanh = (
        [identities.temperature_residual(gating, seed=seed) for seed in seeds]
        for gating in identities.TEMPERATURE_GATINGS
    )
    rows.append(_zero("eq. 15, linear router", linear))
    rows.append(_broken("eq. 15, tanh router", tanh))
    return [*rows, *_rescaling_rows(), *_merge_rows()]


def rate_rows(
    case: Case, sizes: Sequence[int], found: Found, *, where: str | None = None
) -> list[Row]:
    """Slopes of one case beside the theory.

    Args:
        case: The case.
        sizes: Sample sizes.
        found: Errors of each seed.
        where: What the report calls the setting; the case's name by default.
    """
    rows = []
    for claim in CLAIMS[case.name]:
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

    Args:
        near: Errors of each case at one sample size, copies starting together.
        far: The same samples, copies starting apart.
        case_names: A case where they must agree, and one where they must not.
        num_starts: Descents from each way to write the truth.
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
    """Linear experts: the error of the merged cell where that of the function is small.

    Args:
        name: Of the case.
        sizes: Sample sizes, 31,623 among them.
        found: Errors of each seed.
    """
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


def conclusion(rows: Sequence[Row]) -> str:
    """What was confirmed and what was not, from the rows.

    Args:
        rows: All rows of the study.
    """
    judged = [row for row in rows if row.holds is not None]
    failed = [row for row in judged if not row.holds]
    text = f"{len(judged) - len(failed)} of {len(judged)} criteria hold"
    if failed:
        names = "; ".join(f"{row.name} ({row.settings})" for row in failed)
        text += f"; not confirmed: {names}"
    fixed = ", ".join(
        f"{row.mean:.2f} ({row.settings}: {row.name.rpartition(', ')[2]})"
        for row in rows
        if WORST in row.published
    )
    if fixed:
        text += (
            f". Theorems 2, 3 and 6 bound the {WORST}, which no fixed truth can show; "
            f"at ours the exponents of n are {fixed}"
        )
    return text + "."


def _rescaling_rows() -> list[Row]:
    linear, lost = identities.rescaling("linear_temperature", factor=FACTOR)
    tanh, _ = identities.rescaling("tanh_temperature", factor=FACTOR)
    settings = f"b1, b0 and tau times {FACTOR}, D3,1 = {lost:.2f}"
    return [
        _zero("change of f, linear router", [linear], "0 (eq. 15)", settings),
        _broken("change of f, tanh router", [tanh], "not 0 (Theorem 4)", settings),
    ]


def _merge_rows() -> list[Row]:
    rows = []
    for activation in ("identity", "tanh"):
        linear = activation == "identity"
        change, loss = identities.merge(activation, apart=APART)
        settings = f"one expert as two, {APART} apart: {'D2,1' if linear else 'D1'}"
        settings += f" = {loss:.2f}"
        name = f"change of f, {'linear' if linear else activation} experts"
        make = _zero if linear else _broken
        published = "o(D2,r) (eq. 48)" if linear else "at least c D1 (eq. 7)"
        rows.append(make(name, [change], published, settings))
    return rows


def _zero(
    name: str, values: Sequence[float], published: str = "0", settings: str = ""
) -> Row:
    holds = max(values) <= ROUNDING
    return Row(name, published, values, f"<= {ROUNDING}", holds, settings, 16)


def _broken(
    name: str, values: Sequence[float], published: str = "not 0", settings: str = ""
) -> Row:
    return Row(name, published, values, ">= 0.001", min(values) >= 1e-3, settings)


def _median(values: Tensor) -> float:
    return float(values.nanmedian())
