"""The choices of a router over many forward passes, and how even they are.

Axes: V real tokens, E experts, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from damex.moe.metrics import count_pairs
from damex.moe.routing import RoutingRecord

# Below it (in nats) entropies lie too close to each other to say anything.
NO_ROOM = 0.1


@dataclass(frozen=True, eq=False)
class LayerTally:
    """Choices of one router, which add up over steps and processes.

    Attributes:
        counts_GE: Routes that were chosen, including dropped ones, by group of the
            token; one row for all tokens without groups.
        tokens_G: Number of tokens.
        group_experts_GE: True if a group may use an expert; None without groups.
    """

    counts_GE: Tensor
    tokens_G: Tensor
    group_experts_GE: Tensor | None = None

    @classmethod
    def of(cls, record: RoutingRecord, *, num_groups: int | None = None) -> LayerTally:
        """Count the routes of one forward pass.

        With teacher forcing the expert of the largest logit counts, which the router
        would choose by itself. Layers with groups ignore tokens of unknown group.
        `num_groups` is needed only to separate groups that have no experts.
        """
        groups_V, map_GE = record.group_ids_V, record.group_experts_GE
        num_groups = num_groups if map_GE is None else map_GE.shape[0]
        if groups_V is None or num_groups is None:
            map_GE, num_groups = None, 1
            groups_V = record.logits_VE.new_zeros(len(record.logits_VE)).long()
        token_R, expert_R = _choices(record)
        size = (num_groups, record.num_experts)
        counts_GE = count_pairs(groups_V.index_select(0, token_R), expert_R, size)
        tokens_G1 = count_pairs(groups_V, groups_V.new_zeros(()), (num_groups, 1))
        return cls(counts_GE, tokens_G1[:, 0], map_GE)

    def plus(self, other: LayerTally) -> LayerTally:
        """Return the sum of both."""
        return replace(
            self,
            counts_GE=self.counts_GE + other.counts_GE,
            tokens_G=self.tokens_G + other.tokens_G,
        )

    @property
    def share_E(self) -> Tensor:
        """Share of the tokens that chose each expert, float64; sums to K."""
        return self.counts_GE.sum(0).double() / self.tokens_G.sum().clamp_min(1)

    @property
    def expected_E(self) -> Tensor:
        """Load if each group used its experts evenly; uniform without groups."""
        if self.group_experts_GE is None:
            return torch.full_like(self.share_E, 1 / len(self.share_E))
        own_GE = self.group_experts_GE.double()
        tokens_G = self.tokens_G.double() / self.tokens_G.sum().clamp_min(1)
        return tokens_G @ (own_GE / own_GE.sum(1, keepdim=True))

    @property
    def evenness(self) -> float | None:
        """Entropy of the load, from the least possible (0) to the expected (1).

        K experts per token leave at least log K. With experts per dataset, the expected
        load is as uneven as the datasets. None if all loads are about equal: no tokens,
        one dataset, or experts that take all tokens.
        """
        share_E = self.share_E
        least = share_E.sum().clamp_min(1).log()
        room = entropy(self.expected_E) - least
        if share_E.sum() == 0 or room < NO_ROOM:
            return None
        return float((entropy(share_E) - least) / room)

    @property
    def unused(self) -> list[int]:
        """Experts that no token chose, except those of groups without tokens."""
        is_unused_E = (self.share_E == 0) & (self.expected_E > 0)
        return is_unused_E.nonzero().flatten().tolist()


class RoutingTally:
    """Choices of all layers of a detector since the last `take`."""

    def __init__(self) -> None:
        self._layers: dict[str, LayerTally] = {}

    def add(self, records: Mapping[str, RoutingRecord]) -> None:
        """Count one step, given records by layer name; does not synchronize a GPU."""
        add_tallies(
            self._layers, {name: LayerTally.of(r) for name, r in records.items()}
        )

    def take(self) -> dict[str, LayerTally]:
        """Return the counts and reset them."""
        taken, self._layers = self._layers, {}
        return taken


def add_tallies(to: dict[str, LayerTally], more: Mapping[str, LayerTally]) -> None:
    """Add tallies to others in place, by layer name."""
    for name, tally in more.items():
        to[name] = to[name].plus(tally) if name in to else tally


def entropy(counts_E: Tensor) -> Tensor:
    """Entropy in nats of shares that are proportional to the counts."""
    share_E = counts_E.double() / counts_E.sum().clamp_min(1e-12)
    return -torch.xlogy(share_E, share_E).sum()


def _choices(record: RoutingRecord) -> tuple[Tensor, Tensor]:
    """Return token and expert of all routes that the router chose."""
    if record.is_forced:
        expert_V = record.logits_VE.argmax(1)
        return torch.arange(len(expert_V), device=expert_V.device), expert_V
    served, dropped = record.assignment, record.assignment.dropped
    if dropped is None:
        return served.token_index_R, served.expert_index_R
    token_R = torch.cat([served.token_index_R, dropped.token_index_R])
    return token_R, torch.cat([served.expert_index_R, dropped.expert_index_R])
