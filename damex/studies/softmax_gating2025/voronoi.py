"""The Voronoi losses D1 to D6 between fitted mixing measures and the true one.

Axes: S measures, K atoms, J atoms of the truth, A coordinates of a gate's slope,
Q parameters of an expert, G groups of a hierarchy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from damex.studies.softmax_gating2025.measure import Measure, voronoi_cells

__all__ = [
    "CellErrors",
    "Hierarchy",
    "cell_errors",
    "hierarchical_loss",
    "voronoi_loss",
]


def voronoi_loss(
    measure: Measure,
    truth: Measure,
    *,
    order: float | None = None,
    linear: bool = False,
) -> Tensor:
    """D1 (eq. 6) and D4 (eq. 18) without an order, D2,r (10) and D3,r (16) with one.

    Args:
        measure: The fitted ones, aligned.
        truth: One measure (S = 1).
        order: The power r of all differences; None takes the first power in cells of
            one atom and the second in larger ones.
        linear: Whether slope and intercept of experts count apart, as in D2 and D6,
            rather than as one vector.

    Returns:
        loss_S: Zero if and only if the measures are equal.
    """
    cell_SKJ = voronoi_cells(measure, truth)
    mass_SJ = (measure.weight_SK.unsqueeze(2) * cell_SKJ).sum(1)
    off_S = (mass_SJ - truth.weight_SK).abs().sum(1)
    power_SK = _powers(cell_SKJ, order)
    term_SK = sum(
        difference_SK**power_SK
        for difference_SK in _differences(measure, truth, linear=linear)
    )
    return off_S + (measure.weight_SK * term_SK).sum(1)


@dataclass(frozen=True)
class CellErrors:
    """The rates of Theorem 1 for each kind of cell; NaN where there is no such cell.

    Attributes:
        exact_S: Largest |difference| in a cell of one atom.
        over_S: Largest root of the mass-weighted mean of squared differences in a cell
            of several atoms. An atom of vanishing mass may be anywhere in its cell,
            so its own difference says nothing.
    """

    exact_S: Tensor
    over_S: Tensor


def cell_errors(measure: Measure, truth: Measure) -> CellErrors:
    """How far atoms are from the centres of their cells.

    Args:
        measure: The fitted ones, aligned.
        truth: One measure (S = 1).
    """
    cell_SKJ = voronoi_cells(measure, truth)
    size_SJ = cell_SKJ.sum(1)
    distance_SK = torch.linalg.vector_norm(
        torch.stack(_differences(measure, truth)), dim=0
    )
    mass_SKJ = measure.weight_SK.unsqueeze(2) * cell_SKJ
    square_SJ = (mass_SKJ * distance_SK.square().unsqueeze(2)).sum(1)
    root_SJ = (square_SJ / _mass_or_one(mass_SKJ)).sqrt()
    return CellErrors(_largest(root_SJ, size_SJ == 1), _largest(root_SJ, size_SJ > 1))


@dataclass(frozen=True)
class Hierarchy:
    """A two-level measure: groups, each with a measure of its experts.

    Attributes:
        log_weight_SG: b of the groups.
        gate_SGA: a of the groups.
        inner: Second level of each group; all have the same S.
    """

    log_weight_SG: Tensor
    gate_SGA: Tensor
    inner: Sequence[Measure]


def hierarchical_loss(
    measure: Hierarchy,
    truth: Hierarchy,
    *,
    order: float | None = None,
    linear: bool = False,
) -> Tensor:
    """D5 (eq. 25) without an order, D6,r (eq. 29) with one.

    The number of groups is known in the paper, and fitted groups stand in the order of
    the true ones: fits start near the truth.

    Args:
        measure: The fitted ones, second levels aligned.
        truth: One hierarchy (S = 1).
        order: See `voronoi_loss`.
        linear: See `voronoi_loss`.

    Returns:
        loss_S: Zero if and only if the measures are equal.
    """
    weight_SG = measure.log_weight_SG.exp()
    off_S = (weight_SG - truth.log_weight_SG.exp()).abs().sum(1)
    slope_SG = (measure.gate_SGA - truth.gate_SGA).norm(dim=2)
    inner_SG = torch.stack(
        [
            voronoi_loss(mine, true, order=order, linear=linear)
            for mine, true in zip(measure.inner, truth.inner, strict=True)
        ],
        dim=1,
    )
    first_SG = slope_SG if order is None else slope_SG**order
    return off_S + (weight_SG * (first_SG + inner_SG)).sum(1)


def _powers(cell_SKJ: Tensor, order: float | None) -> Tensor:
    if order is not None:
        return torch.full_like(cell_SKJ[:, :, 0], order)
    size_SJ = cell_SKJ.sum(1)
    size_SK = (cell_SKJ @ size_SJ.unsqueeze(2)).squeeze(2)
    return torch.where(size_SK > 1, 2.0, 1.0)


def _differences(
    measure: Measure, truth: Measure, *, linear: bool = False
) -> list[Tensor]:
    """Of gate, expert and temperature to the centre of the atom's cell, (S, K) each."""
    cell_SKJ = voronoi_cells(measure, truth)
    expert_SKQ = measure.expert_SKQ - cell_SKJ @ truth.expert_SKQ
    parts = (
        expert_SKQ.split([expert_SKQ.shape[2] - 1, 1], 2) if linear else [expert_SKQ]
    )
    found = [(measure.gate_SKA - cell_SKJ @ truth.gate_SKA).norm(dim=2)]
    found += [part.norm(dim=2) for part in parts]
    if measure.temperature_S is not None and truth.temperature_S is not None:
        off_S = (measure.temperature_S - truth.temperature_S).abs()
        found.append(off_S.unsqueeze(1).expand_as(found[0]))
    return found


def _mass_or_one(mass_SKJ: Tensor) -> Tensor:
    """Mass of each cell, 1 where there is none."""
    mass_SJ = mass_SKJ.sum(1)
    return torch.where(mass_SJ > 0, mass_SJ, 1.0)


def _largest(value_SJ: Tensor, chosen_SJ: Tensor) -> Tensor:
    largest_S = value_SJ.masked_fill(~chosen_SJ, -torch.inf).amax(1)
    return largest_S.masked_fill(~chosen_SJ.any(1), torch.nan)
