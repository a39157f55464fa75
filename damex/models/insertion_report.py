"""InsertionReport: what a detector's layers were before and what they cost now."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

__all__ = ["InsertedLayer", "InsertionReport", "count_parameters"]


@dataclass(frozen=True)
class InsertedLayer:
    """One replaced block: where and what it was, and what it costs now."""

    name: str
    dense: str
    num_experts: int
    dense_parameters: int
    moe_parameters: int


@dataclass(frozen=True)
class InsertionReport:
    """Every replaced block.

    Attributes:
        layers: In the order of computation.
        notes: What works but is hardly meant, each in a sentence.
    """

    layers: tuple[InsertedLayer, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [
            f"  {row.name}: {row.dense} ({row.dense_parameters:,} parameters) -> "
            f"{row.num_experts} experts ({row.moe_parameters:,})"
            for row in self.layers
        ]
        return "\n".join([f"experts in {len(rows)} layers:", *rows])


def count_parameters(module: nn.Module) -> int:
    """Number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())
