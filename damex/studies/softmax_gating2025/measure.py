"""Mixing measures: weighted atoms, and the two translations that a softmax ignores.

Axes: S measures, K atoms, J atoms of the truth, A coordinates of a gate's slope,
Q parameters of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Measure", "align", "voronoi_cells"]


@dataclass(frozen=True)
class Measure:
    """G = sum_i exp(b0_i / tau) delta(b1_i, tau, eta_i), S of them side by side.

    Attributes:
        log_weight_SK: b0 / tau.
        gate_SKA: b1.
        expert_SKQ: eta.
        temperature_S: tau, or None where the gate has none.
    """

    log_weight_SK: Tensor
    gate_SKA: Tensor
    expert_SKQ: Tensor
    temperature_S: Tensor | None = None

    @property
    def weight_SK(self) -> Tensor:
        """Mass of each atom."""
        return self.log_weight_SK.exp()

    @property
    def atoms_SKP(self) -> Tensor:
        """Gate and expert parameters side by side."""
        return torch.cat([self.gate_SKA, self.expert_SKQ], dim=2)


def voronoi_cells(measure: Measure, truth: Measure) -> Tensor:
    """Cells of the true atoms (eq. 5): to each fitted atom the nearest true one.

    Args:
        measure: The fitted ones.
        truth: One measure (S = 1).

    Returns:
        cell_SKJ: One-hot, float64.
    """
    distance_SKJ = torch.cdist(measure.atoms_SKP, truth.atoms_SKP)
    nearest_SK = distance_SKJ.argmin(2)
    return functional.one_hot(nearest_SK, truth.atoms_SKP.shape[1]).double()


def align(measure: Measure, truth: Measure, *, slopes: bool = True) -> Measure:
    """Fixes what no data can tell: adding a constant to all slopes or all biases.

    The paper pins the truth (assumption A.3: the last slope and bias are zero). A
    fitted measure is moved so that the cell of that atom has the mass and, in the mean,
    the slope of the truth; pinning one fitted atom instead would move the error of an
    over-specified cell into all others. Measures whose cell is empty stay as they are.

    Args:
        measure: The fitted ones.
        truth: One measure (S = 1).
        slopes: Whether the router is blind to a common slope, as a linear one is.
    """
    mine_SK = voronoi_cells(measure, truth)[:, :, -1]
    filled_S = mine_SK.sum(1) > 0
    mass_SK = measure.weight_SK * mine_SK
    mass_S = torch.where(filled_S, mass_SK.sum(1), 1.0)
    shift_S = torch.where(filled_S, mass_S.log() - truth.log_weight_SK[0, -1], 0.0)
    gate_SKA = measure.gate_SKA
    if slopes:
        mean_SA = (mass_SK.unsqueeze(2) * gate_SKA).sum(1) / mass_S.unsqueeze(1)
        move_SA = (mean_SA - truth.gate_SKA[0, -1]) * filled_S.unsqueeze(1)
        gate_SKA = gate_SKA - move_SA.unsqueeze(1)
    return Measure(
        measure.log_weight_SK - shift_S.unsqueeze(1),
        gate_SKA,
        measure.expert_SKQ,
        measure.temperature_S,
    )
