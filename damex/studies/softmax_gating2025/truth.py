"""True mixtures, and ways to write one with more experts than it needs.

Axes: J experts of the truth, S = 1 of measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from damex.studies.softmax_gating2025.measure import Measure
from damex.studies.softmax_gating2025.voronoi import Hierarchy

__all__ = ["Truth"]


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

        Copies share the mass of their expert equally. With `apart` its first copy moves
        up and its last one down by that much in slope and bias, so that their mean
        stays; linear experts with one gate then still add up to the same function.

        Args:
            atom_of: For each new expert the one that it copies; adjacent, two at most.
            apart: How far copies move.
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
        """As one measure.

        Args:
            temperature: Whether tau is a parameter.
        """
        return Measure(
            _row(self.gate_bias) / self.temperature,
            _row(self.gate_slope).unsqueeze(2),
            torch.stack([_row(self.expert_slope), _row(self.expert_bias)], dim=2),
            _row((self.temperature,))[0] if temperature else None,
        )

    def hierarchy(self) -> Hierarchy:
        """As a two-level measure."""
        flat = self.measure()
        groups = [
            [i for i, group in enumerate(self.group_of) if group == g]
            for g in range(len(self.group_bias))
        ]
        inner = [
            Measure(
                flat.log_weight_SK[:, group],
                flat.gate_SKA[:, group],
                flat.expert_SKQ[:, group],
            )
            for group in groups
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
