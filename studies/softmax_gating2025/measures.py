"""Mixing measures (weighted atoms), true ones, and the Voronoi losses D1 to D6.

Axes: S measures, K atoms, J atoms of the truth, A coordinates of a gate's slope,
Q parameters of an expert, G groups of a hierarchy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor
from torch.nn import functional


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

    def part(self, atoms: list[int]) -> Measure:
        """Some of the atoms."""
        return Measure(
            self.log_weight_SK[:, atoms],
            self.gate_SKA[:, atoms],
            self.expert_SKQ[:, atoms],
            self.temperature_S,
        )


def voronoi_cells(measure: Measure, truth: Measure) -> Tensor:
    """Cells of the true atoms (eq. 5), one-hot: to each fitted atom the nearest one."""
    distance_SKJ = torch.cdist(measure.atoms_SKP, truth.atoms_SKP)
    nearest_SK = distance_SKJ.argmin(2)
    return functional.one_hot(nearest_SK, truth.atoms_SKP.shape[1]).double()


def align(measure: Measure, truth: Measure, *, slopes: bool = True) -> Measure:
    """Fix what no data can tell: adding a constant to all slopes or all biases.

    The paper pins the truth (assumption A.3: the last slope and bias are zero), which
    is one measure (S = 1). A fitted measure is moved so that the cell of that atom has
    the mass and, in the mean, the slope of the truth; pinning one fitted atom instead
    would move the error of an over-specified cell into all others. Measures whose cell
    is empty stay as they are. `slopes` says whether the router is blind to a common
    slope, as a linear one is.
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


def voronoi_loss(
    measure: Measure,
    truth: Measure,
    *,
    order: float | None = None,
    linear: bool = False,
) -> Tensor:
    """D1 (eq. 6) and D4 (eq. 18) without an order, D2,r (10) and D3,r (16) with one.

    Of measures that are aligned to one truth (S = 1). The order is the power r of all
    differences; without one it is 1 in cells of one atom and 2 in larger ones. With
    `linear`, slope and intercept of experts count apart, as in D2 and D6, rather than
    as one vector.
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
    """How far atoms are from the centres of their cells."""
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


@dataclass(frozen=True)
class Truth:
    """Parameters of a mixture; the last slope and bias of gates are zero (A.3).

    Attributes:
        gate_slope: b1 of each expert; inside its group in a hierarchy.
        gate_bias: b0 of each expert.
        expert_slope: a.
        expert_bias: b.
        temperature: tau; 1 for gates without one.
        group_slope: a of the first level, for a hierarchy.
        group_bias: b of the first level.
        group_of: Group of each expert.
    """

    gate_slope: tuple[float, ...]
    gate_bias: tuple[float, ...]
    expert_slope: tuple[float, ...]
    expert_bias: tuple[float, ...]
    temperature: float = 1.0
    group_slope: tuple[float, ...] = ()
    group_bias: tuple[float, ...] = ()
    group_of: tuple[int, ...] = ()

    def split(self, atom_of: Sequence[int], *, apart: float = 0.0) -> Truth:
        """The same mixture with copies of its experts.

        `atom_of` names for each new expert the one that it copies; adjacent, two at
        most. Copies share the mass of their expert equally. With `apart` its first copy
        moves up and its last one down by that much in slope and bias, so that their
        mean stays; linear experts with one gate then still add up to the same function.
        """
        copies = Counter(atom_of)
        sides = [
            (atom_of[i + 1 : i + 2] == (j,)) - (i > 0 and atom_of[i - 1] == j)
            for i, j in enumerate(atom_of)
        ]
        return replace(
            self,
            gate_slope=tuple(self.gate_slope[j] for j in atom_of),
            gate_bias=tuple(
                self.gate_bias[j] - self.temperature * log(copies[j]) for j in atom_of
            ),
            expert_slope=_moved(self.expert_slope, atom_of, sides, apart),
            expert_bias=_moved(self.expert_bias, atom_of, sides, apart),
            group_of=tuple(self.group_of[j] for j in atom_of) if self.group_of else (),
        )

    def measure(self, *, temperature: bool = False) -> Measure:
        """As one measure."""
        return Measure(
            _row(self.gate_bias) / self.temperature,
            _row(self.gate_slope).unsqueeze(2),
            torch.stack([_row(self.expert_slope), _row(self.expert_bias)], dim=2),
            _row((self.temperature,))[0] if temperature else None,
        )

    def hierarchy(self) -> Hierarchy:
        """As a two-level measure."""
        flat = self.measure()
        inner = [
            flat.part([i for i, group in enumerate(self.group_of) if group == g])
            for g in range(len(self.group_bias))
        ]
        return Hierarchy(
            _row(self.group_bias), _row(self.group_slope).unsqueeze(2), inner
        )


def _moved(
    values: Sequence[float],
    atom_of: Sequence[int],
    sides: Sequence[int],
    apart: float,
) -> tuple[float, ...]:
    return tuple(
        values[j] + side * apart for j, side in zip(atom_of, sides, strict=True)
    )


def _row(values: Sequence[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)
