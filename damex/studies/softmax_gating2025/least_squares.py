"""Least squares for many small problems at once: Levenberg and Marquardt in a box.

Axes: S problems, A starts per problem, P parameters, N points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Fit", "fit_from_starts", "levenberg_marquardt"]

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
    """The best of several descents for each problem.

    Args:
        model: See `Model`.
        target_SN: What is to be fitted.
        scale_SN: Factor of each residual.
        starts_SAP: Where to start.
        bound: The box is [-bound, bound] in every coordinate.
        steps: Most steps of a descent.
    """
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

    A coordinate at the edge of the box that wants to leave it is held there for the
    step. Problems that came to rest are left out of later steps.

    Args:
        model: See `Model`.
        target_SN: What is to be fitted.
        scale_SN: Factor of each residual; for noise of standard deviation s and n
            observations at a point, sqrt(n) / s makes the cost a chi-square.
        start_SP: Where to start.
        bound: The box is [-bound, bound] in every coordinate.
        steps: Most steps.
        tolerance: Gain of cost over `PATIENCE` steps that counts as next to nothing.
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
