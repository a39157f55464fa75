"""Tests of damex.moe.metrics."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from damex.moe import (
    Assignment,
    Packing,
    RoutingRecord,
    TopKGate,
    dispatch_counts,
    dispatch_entropy,
    mutual_information,
    routing_hits,
)


def make_record(experts, group_ids, *, group_experts=None, num_experts=3):
    """One token per entry, sent to the given expert."""
    logits = 5.0 * torch.nn.functional.one_hot(torch.tensor(experts), num_experts)
    return RoutingRecord(
        logits_VE=logits,
        packing=Packing(1, len(logits)),
        group_ids_V=None if group_ids is None else torch.tensor(group_ids),
        assignment=TopKGate(1)(logits),
        group_experts_GE=None if group_experts is None else torch.tensor(group_experts),
    )


def test_dispatch_counts_leave_out_tokens_of_unknown_groups():
    record = make_record([0, 0, 2, 2, 1, 1], [0, 1, 1, 1, -1, 0])
    counts = dispatch_counts(record, num_groups=3)
    assert counts.tolist() == [[1, 1, 0], [1, 0, 2], [0, 0, 0]]


def test_dispatch_counts_know_the_groups_from_the_map_and_count_all_k():
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    record = RoutingRecord(
        logits_VE=logits,
        packing=Packing(1, 2),
        group_ids_V=torch.tensor([0, 1]),
        assignment=TopKGate(2)(logits),
        group_experts_GE=torch.eye(2, 3).bool(),
    )
    assert dispatch_counts(record).tolist() == [[0, 1, 1], [1, 1, 0]]


def test_dispatch_entropy_extremes():
    # every expert sees all four groups alike: log 4
    uniform = torch.full((4, 3), 5)
    assert dispatch_entropy(uniform).item() == pytest.approx(math.log(4))
    # one group per expert; the third expert is empty and skipped
    pure = torch.tensor([[7, 0, 0], [0, 3, 0]])
    assert dispatch_entropy(pure).item() == 0.0
    assert dispatch_entropy(torch.zeros(2, 3, dtype=torch.int64)).item() == 0.0


def test_dispatch_entropy_by_hand():
    # expert 0: (1, 3) of 8 routes, entropy H(1/4); expert 1: (2, 2), entropy log 2
    h_quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    expected = 0.5 * h_quarter + 0.5 * math.log(2)
    entropy = dispatch_entropy(torch.tensor([[1, 2], [3, 2]]))
    assert entropy.item() == pytest.approx(expected)


def test_mutual_information():
    assert mutual_information(torch.eye(3) * 4).item() == pytest.approx(math.log(3))
    # rows in proportion: routing ignores the group
    independent = mutual_information(torch.tensor([[1, 2], [3, 6]])).item()
    assert independent == pytest.approx(0.0, abs=1e-12)
    # p = (1/2, 1/4; 0, 1/4), p_g = (3/4, 1/4), p_e = (1/2, 1/2):
    # 1/2 log(4/3) + 1/4 log(2/3) + 1/4 log 2
    expected = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3) + 0.25 * math.log(2)
    value = mutual_information(torch.tensor([[2, 1], [0, 1]])).item()
    assert value == pytest.approx(expected)
    assert mutual_information(torch.zeros(2, 2)).item() == 0.0


def test_routing_hits():
    record = make_record(
        [0, 1, 2, 2, 0],
        [0, 0, 1, 1, -1],
        group_experts=[[True, False, False], [False, True, True], [True, True, True]],
    )
    # group 0: expert 0 is its own, 1 is not; group 1: both on expert 2; group 2
    # has no token
    hits, tokens = routing_hits(record)
    assert (hits.tolist(), tokens.tolist()) == ([1, 2, 0], [2, 2, 0])


def test_routing_hits_look_at_the_heaviest_route():
    # token 0: experts 0 (.9) and 1 (.1); token 1: 0 (.4) and 1 (.6);
    # token 2: 0 and 1 tie, so expert 0; token 3 has no route
    assignment = Assignment.from_pairs(
        torch.tensor([0, 0, 1, 1, 2, 2]),
        torch.tensor([1, 0, 1, 0, 1, 0]),
        torch.tensor([0.1, 0.9, 0.6, 0.4, 0.5, 0.5]),
        num_tokens=4,
        num_experts=2,
    )
    record = RoutingRecord(
        logits_VE=torch.zeros(4, 2),
        packing=Packing(1, 4),
        group_ids_V=torch.zeros(4, dtype=torch.int64),
        assignment=assignment,
        group_experts_GE=torch.tensor([[True, False]]),
    )
    hits, tokens = routing_hits(record)
    assert (hits.tolist(), tokens.tolist()) == ([2], [4])


def test_routing_hits_of_forced_routes_are_what_the_router_would_do():
    record = make_record(
        [0, 0, 1, 1], [0, 0, 1, 1], group_experts=[[True, False], [False, True]]
    )
    logits_VE = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [4.0, 0.0]])
    forced = dataclasses.replace(record, logits_VE=logits_VE, is_forced=True)
    hits, tokens = routing_hits(forced)
    assert (hits.tolist(), tokens.tolist()) == ([1, 0], [2, 2])
    free = dataclasses.replace(forced, is_forced=False)
    assert routing_hits(free)[0].tolist() == [2, 2]


def test_errors():
    with pytest.raises(ValueError, match="pass group_ids_B"):
        dispatch_counts(make_record([0], None))
    with pytest.raises(ValueError, match="pass num_groups"):
        dispatch_counts(make_record([0], [0]))
    with pytest.raises(ValueError, match="no group_experts"):
        routing_hits(make_record([0], [0]))
