"""Metrics of routing: pure functions of a record or of counts.

Counts add up over batches and layers; take entropies and shares of the sums.

Axes: V real tokens, E experts, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from damex.moe.routing import RoutingRecord


def dispatch_counts(record: RoutingRecord, *, num_groups: int | None = None) -> Tensor:
    """Count the routes from each dataset group to each expert, without unknown groups.

    `num_groups` is needed only without a group-expert map. Raises ValueError if it is
    missing, or the record has no group ids.
    """
    group_ids_V = _group_ids(record)
    if num_groups is None:
        if record.group_experts_GE is None:
            raise ValueError(
                "dispatch_counts: the layer has no group_experts; pass num_groups"
            )
        num_groups = record.group_experts_GE.shape[0]
    assignment = record.assignment
    group_R = group_ids_V.index_select(0, assignment.token_index_R)
    size = (num_groups, record.num_experts)
    return count_pairs(group_R, assignment.expert_index_R, size)


def count_pairs(row_R: Tensor, column_R: Tensor, size: tuple[int, int]) -> Tensor:
    """Count how often each row occurs with each column, as an int64 matrix.

    Rows of -1 are ignored; `column_R` may also be a single column for all.
    """
    rows, columns = size
    # Rows of -1 are counted in a row of their own, which is then cut off.
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
    # xlogy is 0 at 0, so empty cells and empty experts need no special case.
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
    """Count the tokens whose heaviest route goes to an expert of their group.

    Ties go to the lowest expert id; a token without routes is a miss. With teacher
    forcing the expert of the largest logit counts, which the router would choose by
    itself.

    Returns hits_G and tokens_G, int64: hits and all tokens of each group. Raises
    ValueError if the record has no group ids or no group-expert map.
    """
    group_ids_V = _group_ids(record)
    if record.group_experts_GE is None:
        raise ValueError("routing_hits: the layer has no group_experts")
    num_groups, num_experts = record.group_experts_GE.shape
    is_forced = record.is_forced
    top_V = record.logits_VE.argmax(1) if is_forced else top1_expert(record)
    row_V = group_ids_V + 1
    # One more row for unknown groups, one more column for tokens without a route.
    own = torch.zeros(
        num_groups + 1, num_experts + 1, dtype=torch.int64, device=row_V.device
    )
    own[1:, :num_experts] = record.group_experts_GE
    zeros = row_V.new_zeros(num_groups + 1)
    hits = zeros.scatter_add(0, row_V, own[row_V, top_V])
    tokens = zeros.scatter_add(0, row_V, torch.ones_like(row_V))
    return hits[1:], tokens[1:]


def top1_expert(record: RoutingRecord) -> Tensor:
    """Return the expert of each token's heaviest route, E for tokens without a route.

    Ties go to the lowest expert id.
    """
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


def _group_ids(record: RoutingRecord) -> Tensor:
    if record.group_ids_V is None:
        raise ValueError(
            "routing metrics: the record has no group ids; pass group_ids_B to the "
            "forward of the layer"
        )
    return record.group_ids_V
