"""Metrics of routing: functions of a record or of counts, and tallies of many steps.

Counts add up over batches and layers; take entropies and shares of the sums.

Axes: V real tokens, E experts, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from damex.moe.routing import RoutingRecord


def dispatch_counts(record: RoutingRecord) -> Tensor:
    """Count the routes from each dataset group to each expert, without unknown groups.

    Raises ValueError if the record has no group ids or no group-expert map.
    """
    group_ids_V, own_GE = record.groups("routing metrics")
    assignment = record.assignment
    group_R = group_ids_V.index_select(0, assignment.token_index_R)
    size = (len(own_GE), record.num_experts)
    return count_pairs(group_R, assignment.expert_index_R, size)


def count_pairs(row_R: Tensor, column_R: Tensor, size: tuple[int, int]) -> Tensor:
    """Count how often each row occurs with each column, as an int64 matrix.

    Rows of -1 are ignored; `column_R` may also be a single column for all.
    """
    rows, columns = size
    # Rows of -1 are counted in an extra row, which is then cut off.
    cell_R = (row_R + 1) * columns + column_R
    counts = cell_R.new_zeros((rows + 1) * columns)
    counts = counts.scatter_add(0, cell_R, torch.ones_like(cell_R))
    return counts.view(rows + 1, columns)[1:]


def dispatch_entropy(counts_GE: Tensor) -> Tensor:
    """Entropy of groups within experts, in nats (Chen et al. 2022, eq. 6.1).

    -sum_e (n_e / n) sum_g (n_ge / n_e) log(n_ge / n_e), over experts with tokens: 0
    when each expert serves one group, log G when all experts see all groups alike.
    """
    counts_GE = counts_GE.double()
    counts_E = counts_GE.sum(0)
    # xlogy(0, 0) is 0, so empty cells and experts are not a special case.
    # Chen et al. 2022, eq. 6.1: n_km / n_m.
    share_GE = counts_GE / counts_E.clamp_min(1)
    return -torch.xlogy(counts_GE, share_GE).sum() / counts_E.sum().clamp_min(1)


def mutual_information(counts_GE: Tensor) -> Tensor:
    """Mutual information of group and expert, in nats.

    sum_ge p_ge log(p_ge / (p_g p_e)): 0 when routing ignores the group, at most min(log
    G, log E).
    """
    probs_GE = counts_GE.double() / counts_GE.sum().clamp_min(1)
    outer_GE = probs_GE.sum(1, keepdim=True) * probs_GE.sum(0, keepdim=True)
    return (torch.xlogy(probs_GE, probs_GE) - torch.xlogy(probs_GE, outer_GE)).sum()


def dropped_counts(record: RoutingRecord) -> tuple[Tensor, Tensor]:
    """Count the routes dropped by a capacity (for k=1, tokens) and all routes."""
    assignment = record.assignment
    served = assignment.counts_E.sum()
    if assignment.dropped is None:
        return torch.zeros_like(served), served
    dropped = assignment.dropped.counts_E.sum()
    return dropped, served + dropped


def routing_hits(record: RoutingRecord) -> tuple[Tensor, Tensor]:
    """Count hits and tokens of each group: a hit's heaviest route is to its own group.

    Ties go to the lowest expert id; a token without routes is a miss. With teacher
    forcing the expert of the largest logit counts, which the router would choose by
    itself. Raises ValueError if the record has no group ids or no group-expert map.
    """
    group_ids_V, own_GE = record.groups("routing metrics")
    top_V = record.logits_VE.argmax(1) if record.is_forced else top1_expert(record)
    own = functional.pad(own_GE, (0, 1))  # False without a route
    hit_V = torch.where(own[group_ids_V, top_V], group_ids_V, -1)
    return _tokens_by_group(hit_V, len(own)), _tokens_by_group(group_ids_V, len(own))


def _tokens_by_group(group_ids_V: Tensor, num_groups: int) -> Tensor:
    return count_pairs(group_ids_V, group_ids_V.new_zeros(()), (num_groups, 1))[:, 0]


def top1_expert(record: RoutingRecord) -> Tensor:
    """Return the expert of each token's heaviest route, E without routes."""
    assignment = record.assignment
    token_index_R, weight_R = assignment.token_index_R, assignment.weight_R.detach()
    heaviest_V = weight_R.new_zeros(assignment.num_tokens).scatter_reduce(
        0, token_index_R, weight_R, "amax", include_self=False
    )
    is_heaviest_R = weight_R == heaviest_V.index_select(0, token_index_R)
    none = record.num_experts
    candidate_R = torch.where(is_heaviest_R, assignment.expert_index_R, none)
    return candidate_R.new_full((assignment.num_tokens,), none).scatter_reduce(
        0, token_index_R, candidate_R, "amin"
    )


# In nats; below it, entropies are too close to each other to compare.
MIN_ENTROPY_RANGE = 0.1


@dataclass(frozen=True, eq=False)
class LayerTally:
    """Choices of one router, which add up over steps and processes.

    `counts_GE` are routes, including dropped ones, by the group of their token, in one
    row without groups; `tokens_G` the numbers of tokens.
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
        return cls(counts_GE, _tokens_by_group(groups_V, num_groups), map_GE)

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
        # Chen et al. 2022, eq. 5.1: Load_m = sum_i P(m_i = m), as a share.
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
        if share_E.sum() == 0 or room < MIN_ENTROPY_RANGE:
            return None
        return float((entropy(share_E) - least) / room)

    @property
    def unused(self) -> list[int]:
        """Experts that no token chose, except those of groups without tokens."""
        is_unused_E = (self.share_E == 0) & (self.expected_E > 0)
        return is_unused_E.nonzero().flatten().tolist()


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
