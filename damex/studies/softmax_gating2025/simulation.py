"""Fits to simulated samples, and how far each is from the truth.

Axes: S samples, A starts, P parameters, N support points of the inputs, K experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from damex.studies.softmax_gating2025.cases import Case
from damex.studies.softmax_gating2025.families import Family
from damex.studies.softmax_gating2025.least_squares import fit_from_starts
from damex.studies.softmax_gating2025.measure import align
from damex.studies.softmax_gating2025.voronoi import (
    Hierarchy,
    cell_errors,
    hierarchical_loss,
    voronoi_loss,
)

__all__ = ["Plan", "errors_at", "family_of", "simulate", "support"]

BOUND = 8.0  # the compact box of assumption A.1
SPREAD = 0.3  # standard deviation of starts around the truth


@dataclass(frozen=True)
class Plan:
    """How much is simulated.

    Attributes:
        sizes: Sample sizes n.
        repetitions: Samples of each size, per seed.
        starts: Descents from each way to write the truth.
        steps: Most steps of a descent.
        points: N, the number of values that an input can take.
        apart: How far copies of an expert stand apart in the starts, if that is further
            than the case has it.
    """

    sizes: tuple[int, ...]
    repetitions: int
    starts: int = 2
    steps: int = 300
    points: int = 41
    apart: float = 0.0


def support(points: int) -> Tensor:
    """Equally likely inputs in [-2, 2], one draw of which is X."""
    return torch.linspace(-2.0, 2.0, points, dtype=torch.float64)


def family_of(case: Case, points: int) -> Family:
    """The mixtures that are fitted in a case."""
    return Family(
        case.gating,
        case.num_experts,
        activation=case.activation,
        points_N=support(points),
        normalised=case.normalised,
    )


def simulate(case: Case, plan: Plan, *, seed: int) -> dict[str, Tensor]:
    """Least squares on samples of each size.

    X takes N values. Given how often each came, the mean of Y at a value is normal, and
    the sum of squares over the sample differs from the weighted one over these means
    by a constant. So the fit is the least-squares fit of eq. 3 at a cost that does not
    depend on n.

    Args:
        case: What is fitted.
        plan: How much.
        seed: Of samples and starts.

    Returns:
        For each quantity its values (sizes, repetitions); see `errors_at`.
    """
    generator = torch.Generator().manual_seed(seed)
    family = family_of(case, plan.points)
    apart = max(plan.apart, case.apart)
    ways = [case.truth.split(way, apart=apart) for way in case.atom_of]
    truth_1P = family.theta(case.truth.split(case.atom_of[0])).unsqueeze(0)
    truth_1N = family.regression.values(truth_1P)
    draws = np.random.default_rng(seed)
    count_SN = torch.cat([_counts(n, plan, draws) for n in plan.sizes])
    noise_SN = torch.randn(count_SN.shape, generator=generator, dtype=torch.float64)
    target_SN = truth_1N + case.noise * noise_SN / count_SN.clamp_min(1).sqrt()
    start_AP = torch.stack([family.theta(way) for way in ways])
    start_AP = start_AP.repeat_interleave(plan.starts, 0)
    start_SAP = start_AP + SPREAD * torch.randn(
        (len(count_SN), *start_AP.shape), generator=generator, dtype=torch.float64
    )
    fit = fit_from_starts(
        family.regression.values_and_jacobian,
        target_SN,
        count_SN.sqrt() / case.noise,
        start_SAP,
        bound=BOUND,
        steps=plan.steps,
    )
    found = dict(errors_at(case, family, fit.theta_SP))
    found["function"] = _distance(family.regression.values(fit.theta_SP), truth_1N)
    found["cost"] = fit.cost_S
    found["at rest"] = fit.resting_S.double()
    shape = (len(plan.sizes), plan.repetitions)
    return {name: value_S.view(shape) for name, value_S in found.items()}


def errors_at(case: Case, family: Family, theta_SP: Tensor) -> Mapping[str, Tensor]:
    """Distances of parameters from the truth.

    Args:
        case: What is fitted.
        family: Its mixtures.
        theta_SP: Fitted parameters.

    Returns:
        'loss', 'exact' and 'over' (see `CellErrors`); with a temperature also 'tau',
        'slope' (b1), 'ratio' (b1 / tau) and 'experts' where the number of experts is
        exact; with two levels 'first level'.
    """
    if case.gating == "hierarchical":
        return _hierarchical_errors(case, family.hierarchy(theta_SP))
    truth = case.truth.measure(temperature=family.has_temperature)
    fitted = align(family.measure(theta_SP), truth, slopes=family.translates)
    cells = cell_errors(fitted, truth)
    found = dict(
        loss=voronoi_loss(fitted, truth, order=case.order, linear=case.linear),
        exact=cells.exact_S,
        over=cells.over_S,
    )
    if fitted.temperature_S is None or truth.temperature_S is None:
        return found
    found["tau"] = (fitted.temperature_S - truth.temperature_S).abs()
    if fitted.gate_SKA.shape[1] == truth.gate_SKA.shape[1]:
        tau_S11 = fitted.temperature_S.view(-1, 1, 1)
        ratio_SKA = fitted.gate_SKA / tau_S11 - truth.gate_SKA / truth.temperature_S
        found["slope"] = _largest(fitted.gate_SKA - truth.gate_SKA)
        found["ratio"] = _largest(ratio_SKA)
        found["experts"] = _largest(fitted.expert_SKQ - truth.expert_SKQ)
    return found


def _hierarchical_errors(case: Case, fitted: Hierarchy) -> dict[str, Tensor]:
    truth = case.truth.hierarchy()
    inner = [
        align(mine, true) for mine, true in zip(fitted.inner, truth.inner, strict=True)
    ]
    fitted = Hierarchy(fitted.log_weight_SG, fitted.gate_SGA, inner)
    cells = [
        cell_errors(mine, true) for mine, true in zip(inner, truth.inner, strict=True)
    ]
    first_SG = (fitted.gate_SGA - truth.gate_SGA).norm(dim=2) + (
        fitted.log_weight_SG - truth.log_weight_SG
    ).abs()
    return {
        "loss": hierarchical_loss(fitted, truth, order=case.order, linear=case.linear),
        "exact": _worst([cell.exact_S for cell in cells]),
        "over": _worst([cell.over_S for cell in cells]),
        "first level": first_SG.amax(1),
    }


def _counts(n: int, plan: Plan, draws: np.random.Generator) -> Tensor:
    """How often each input came in samples of size n, (repetitions, N)."""
    chances = np.full(plan.points, 1 / plan.points)
    return torch.from_numpy(draws.multinomial(n, chances, plan.repetitions)).double()


def _distance(f_SN: Tensor, truth_1N: Tensor) -> Tensor:
    """Root mean square over the inputs: the norm of L2(mu)."""
    return (f_SN - truth_1N).square().mean(1).sqrt()


def _largest(difference_SKA: Tensor) -> Tensor:
    return difference_SKA.norm(dim=2).amax(1)


def _worst(values: Sequence[Tensor]) -> Tensor:
    """The larger one where both are known."""
    stacked = torch.stack(list(values))
    largest_S = stacked.nan_to_num(-torch.inf).amax(0)
    return largest_S.masked_fill(largest_S.isinf(), torch.nan)
