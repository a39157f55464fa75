"""Fits to simulated samples, and how far each is from the truth.

Least squares is done for many small problems at once: Levenberg and Marquardt in a box.

Axes: S samples (problems), A starts of each, P parameters, N support points of the
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from studies.softmax_gating2025.cases import Case
from studies.softmax_gating2025.measures import (
    Hierarchy,
    align,
    cell_errors,
    hierarchical_loss,
    voronoi_loss,
)
from studies.softmax_gating2025.regression import Family

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
    the sum of squares over the sample differs from the weighted one over these means by
    a constant. So the fit is the least-squares fit of eq. 3 at a cost that does not
    depend on n.

    Returns (sizes, repetitions) of each quantity; see `errors_at`.
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
    values_SN = family.regression.values(fit.theta_SP)
    found["function"] = (values_SN - truth_1N).square().mean(1).sqrt()  # norm of L2(mu)
    found["cost"] = fit.cost_S
    found["at rest"] = fit.resting_S.double()
    shape = (len(plan.sizes), plan.repetitions)
    return {name: value_S.view(shape) for name, value_S in found.items()}


def errors_at(case: Case, family: Family, theta_SP: Tensor) -> Mapping[str, Tensor]:
    """Distances of parameters from the truth.

    'loss', 'exact' and 'over' (see `CellErrors`); with a temperature also 'tau',
    'slope' (b1), 'ratio' (b1 / tau) and 'experts' where the number of experts is exact;
    with two levels 'first level'.
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
        # fmax: the larger one where both are known
        "exact": reduce(torch.fmax, [cell.exact_S for cell in cells]),
        "over": reduce(torch.fmax, [cell.over_S for cell in cells]),
        "first level": first_SG.amax(1),
    }


def _counts(n: int, plan: Plan, draws: np.random.Generator) -> Tensor:
    """How often each input came in samples of size n, (repetitions, N)."""
    chances = np.full(plan.points, 1 / plan.points)
    return torch.from_numpy(draws.multinomial(n, chances, plan.repetitions)).double()


def _largest(difference_SKA: Tensor) -> Tensor:
    return difference_SKA.norm(dim=2).amax(1)


# What a model must offer: theta_SP -> values (S, N) and Jacobian (S, N, P).
Model = Callable[[Tensor], tuple[Tensor, Tensor]]

PATIENCE = 12  # a problem rests when this many steps in a row gained next to nothing
SMALLEST_DAMPING = 1e-12
LARGEST_DAMPING = 1e12


@dataclass(frozen=True)
class Fit:
    """Parameters and their cost.

    Attributes:
        theta_SP: The best parameters found.
        cost_S: Weighted sum of squared residuals there.
        resting_S: Whether the descent had come to rest.
    """

    theta_SP: Tensor
    cost_S: Tensor
    resting_S: Tensor


def fit_from_starts(
    model: Model,
    target_SN: Tensor,
    scale_SN: Tensor,
    starts_SAP: Tensor,
    *,
    bound: float,
    steps: int,
) -> Fit:
    """The best of several descents for each problem; see `levenberg_marquardt`."""
    S, A, P = starts_SAP.shape
    found = levenberg_marquardt(
        model,
        target_SN.repeat_interleave(A, 0),
        scale_SN.repeat_interleave(A, 0),
        starts_SAP.reshape(S * A, P),
        bound=bound,
        steps=steps,
    )
    best_S = found.cost_S.view(S, A).argmin(1) + A * torch.arange(S)
    return Fit(found.theta_SP[best_S], found.cost_S[best_S], found.resting_S[best_S])


def levenberg_marquardt(
    model: Model,
    target_SN: Tensor,
    scale_SN: Tensor,
    start_SP: Tensor,
    *,
    bound: float,
    steps: int,
    tolerance: float = 1e-7,
) -> Fit:
    """Damped Gauss-Newton steps with Marquardt's scaling, all problems side by side.

    A coordinate at the edge of the box [-bound, bound] that wants to leave it is held
    there for the step. Problems that gained less than the tolerance over `PATIENCE`
    steps are left out of later steps.

    The scale is a factor of each residual; for noise of standard deviation s and n
    observations at a point, sqrt(n) / s makes the cost a chi-square.
    """
    theta_SP = start_SP.clamp(-bound, bound)
    problems = torch.arange(len(theta_SP))
    state = _State.at(model, theta_SP, target_SN, scale_SN)
    cost_S = state.cost_S.clone()
    resting_S = torch.zeros(len(theta_SP), dtype=torch.bool)
    for _ in range(steps):
        state.step(model, target_SN[problems], scale_SN[problems], bound)
        theta_SP[problems], cost_S[problems] = state.theta_SP, state.cost_S
        done = state.gain_S < tolerance
        resting_S[problems] = done
        if done.all():
            break
        if done.any():
            problems = problems[~done]
            state = state.of(~done)
    return Fit(theta_SP, cost_S, resting_S)


@dataclass
class _State:
    theta_SP: Tensor
    residual_SN: Tensor
    jacobian_SNP: Tensor
    cost_S: Tensor
    damping_S: Tensor
    recent_SW: Tensor  # costs of the last steps, newest last

    @classmethod
    def at(
        cls, model: Model, theta_SP: Tensor, target_SN: Tensor, scale_SN: Tensor
    ) -> _State:
        residual_SN, jacobian_SNP = _residuals(model, theta_SP, target_SN, scale_SN)
        cost_S = residual_SN.square().sum(1)
        return cls(
            theta_SP.clone(),
            residual_SN,
            jacobian_SNP,
            cost_S,
            torch.full_like(cost_S, 1e-2),
            torch.full((len(cost_S), PATIENCE), torch.inf, dtype=cost_S.dtype),
        )

    @property
    def gain_S(self) -> Tensor:
        return self.recent_SW[:, 0] - self.cost_S

    def of(self, chosen: Tensor) -> _State:
        return _State(*(value[chosen] for value in vars(self).values()))

    def step(
        self, model: Model, target_SN: Tensor, scale_SN: Tensor, bound: float
    ) -> None:
        trial_SP = (self.theta_SP + self._direction(bound)).clamp(-bound, bound)
        residual_SN, jacobian_SNP = _residuals(model, trial_SP, target_SN, scale_SN)
        cost_S = residual_SN.square().sum(1)
        better = cost_S < self.cost_S
        self.theta_SP[better] = trial_SP[better]
        self.residual_SN[better] = residual_SN[better]
        self.jacobian_SNP[better] = jacobian_SNP[better]
        self.cost_S[better] = cost_S[better]
        factor = torch.where(better, 0.2, 4.0)
        self.damping_S = (self.damping_S * factor).clamp(
            SMALLEST_DAMPING, LARGEST_DAMPING
        )
        self.recent_SW = torch.cat([self.recent_SW[:, 1:], self.cost_S[:, None]], 1)

    def _direction(self, bound: float) -> Tensor:
        transposed_SPN = self.jacobian_SNP.mT
        gradient_SP = (transposed_SPN @ self.residual_SN.unsqueeze(2)).squeeze(2)
        held_SP = (self.theta_SP.abs() >= bound) & (self.theta_SP * gradient_SP < 0)
        gradient_SP = gradient_SP.masked_fill(held_SP, 0.0)
        normal_SPP = transposed_SPN @ self.jacobian_SNP
        free_SP = (~held_SP).to(normal_SPP.dtype)
        normal_SPP = normal_SPP * free_SP.unsqueeze(1) * free_SP.unsqueeze(2)
        size_SP = normal_SPP.diagonal(dim1=1, dim2=2)
        # The floor keeps directions that the data do not see from running away.
        floor_S1 = 1e-9 * size_SP.amax(1, keepdim=True) + 1e-30
        damped_SP = self.damping_S.unsqueeze(1) * size_SP.maximum(floor_S1)
        return -torch.linalg.solve(
            normal_SPP + torch.diag_embed(damped_SP + floor_S1 * 1e-6), gradient_SP
        )


def _residuals(
    model: Model, theta_SP: Tensor, target_SN: Tensor, scale_SN: Tensor
) -> tuple[Tensor, Tensor]:
    f_SN, jacobian_SNP = model(theta_SP)
    return (f_SN - target_SN) * scale_SN, jacobian_SNP * scale_SN.unsqueeze(2)
