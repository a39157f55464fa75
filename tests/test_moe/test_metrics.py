"""Metrics of routing, and tallies of what routers chose."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from damex.moe import (
    Assignment,
    DenseSoftmaxGate,
    ExpertCapacity,
    ExpertChoiceGate,
    LayerTally,
    Packing,
    RoutingRecord,
    RoutingTally,
    TopKGate,
    dispatch_counts,
    dispatch_entropy,
    entropy,
    mutual_information,
    routing_hits,
)

EYE = torch.eye(4).tolist()


def make_record(experts, groups=None, *, num_experts=4, own=None, gate=None):
    """One token per entry, whose router prefers the given expert."""
    logits_VE = 5.0 * torch.nn.functional.one_hot(torch.tensor(experts), num_experts)
    packing = Packing(1, len(logits_VE))
    return RoutingRecord(
        logits_VE=logits_VE,
        packing=packing,
        group_ids_V=None if groups is None else torch.tensor(groups),
        assignment=(gate or TopKGate(1))(logits_VE, packing),
        group_experts_GE=None if own is None else torch.tensor(own).bool(),
    )


def tally(*args, **kwargs):
    return LayerTally.of(make_record(*args, **kwargs))


def test_dispatch_counts_leave_out_tokens_of_unknown_groups():
    record = make_record([0, 0, 2, 2, 1, 1], [0, 1, 1, 1, -1, 0], num_experts=3)
    counts = dispatch_counts(record, num_groups=3)
    assert counts.tolist() == [[1, 1, 0], [1, 0, 2], [0, 0, 0]]


def test_dispatch_counts_know_the_groups_from_the_map_and_count_all_k():
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    record = make_record([0, 0], [0, 1], own=[[1, 0, 0], [0, 1, 0]], num_experts=3)
    record = dataclasses.replace(record, assignment=TopKGate(2)(logits))
    assert dispatch_counts(record).tolist() == [[0, 1, 1], [1, 1, 0]]


def test_dispatch_entropy():
    # every expert sees all four groups alike: log 4
    uniform = torch.full((4, 3), 5)
    assert dispatch_entropy(uniform).item() == pytest.approx(math.log(4))
    # one group per expert; the third expert is empty and skipped
    pure = torch.tensor([[7, 0, 0], [0, 3, 0]])
    assert dispatch_entropy(pure).item() == 0.0
    assert dispatch_entropy(torch.zeros(2, 3, dtype=torch.int64)).item() == 0.0
    # expert 0: (1, 3) of 8 routes, entropy H(1/4); expert 1: (2, 2), entropy log 2
    h_quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    expected = 0.5 * h_quarter + 0.5 * math.log(2)
    found = dispatch_entropy(torch.tensor([[1, 2], [3, 2]]))
    assert found.item() == pytest.approx(expected)


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
    own = [[1, 0, 0], [0, 1, 1], [1, 1, 1]]
    record = make_record([0, 1, 2, 2, 0], [0, 0, 1, 1, -1], own=own, num_experts=3)
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
    record = make_record([0] * 4, [0] * 4, own=[[1, 0]], num_experts=2)
    hits, tokens = routing_hits(dataclasses.replace(record, assignment=assignment))
    assert (hits.tolist(), tokens.tolist()) == ([2], [4])


def test_forced_routes_count_as_the_router_would_choose():
    record = make_record([0, 1, 2, 3], [0, 1, 2, 3], own=EYE)
    all_to_2 = torch.tensor([0.0, 0.0, 1.0, 0.0]).expand(4, 4)
    forced = dataclasses.replace(record, logits_VE=all_to_2, is_forced=True)
    assert LayerTally.of(forced).share_E.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert routing_hits(forced)[0].tolist() == [0, 0, 1, 0]
    free = dataclasses.replace(forced, is_forced=False)
    assert LayerTally.of(free).share_E.tolist() == [0.25] * 4
    assert routing_hits(free)[0].tolist() == [1] * 4


def test_records_without_groups_are_rejected():
    with pytest.raises(ValueError, match="pass group_ids_B"):
        dispatch_counts(make_record([0]))
    with pytest.raises(ValueError, match="pass num_groups"):
        dispatch_counts(make_record([0], [0]))
    with pytest.raises(ValueError, match="no group_experts"):
        routing_hits(make_record([0], [0]))


def test_entropy_by_hand():
    assert entropy(torch.tensor([3, 3])).item() == pytest.approx(math.log(2))
    assert entropy(torch.tensor([7, 0, 0])).item() == 0.0
    assert entropy(torch.zeros(2)).item() == 0.0
    quarter = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert entropy(torch.tensor([1, 3])).item() == pytest.approx(quarter)


def test_a_tally_counts_by_group_and_leaves_unknown_groups_out():
    found = tally([0, 0, 2, 1, 3], [0, 1, 1, 1, -1], own=EYE)
    assert found.counts_GE.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [0] * 4, [0] * 4]
    assert found.tokens_G.tolist() == [1, 3, 0, 0]
    assert found.share_E.tolist() == [0.5, 0.25, 0.25, 0.0]


def test_without_a_map_all_tokens_are_one_group():
    record = make_record([0, 0, 2, 1, 3], [0, 1, 1, 1, -1])
    found = LayerTally.of(record)
    assert found.counts_GE.tolist() == [[2, 1, 1, 1]]
    assert found.tokens_G.tolist() == [5]
    assert found.expected_E.tolist() == [0.25] * 4
    separate = LayerTally.of(record, num_groups=2)
    assert separate.counts_GE.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert separate.expected_E.tolist() == [0.25] * 4


def test_what_a_capacity_drops_was_chosen_too():
    found = tally([2] * 8, gate=TopKGate(1, capacity=ExpertCapacity(factor=1.0)))
    assert found.share_E.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert found.evenness == pytest.approx(0.0)


def test_evenness_is_the_entropy_of_the_load_relative_to_the_expected_one():
    assert tally([0, 1, 2, 3]).evenness == pytest.approx(1.0)
    assert tally([0, 0, 1, 1]).evenness == pytest.approx(0.5)
    assert tally([3, 3, 3, 3]).evenness == pytest.approx(0.0)


def test_datasets_of_unequal_size_are_not_a_collapse():
    """9 of 10 tokens are of one dataset, and each goes where it belongs."""
    experts = groups = [0] * 27 + [1, 2, 3]
    assert tally(experts, groups, own=EYE).evenness == pytest.approx(1.0)
    assert tally(experts, groups).evenness < 0.4
    assert tally([0] * 30, groups, own=EYE).evenness == pytest.approx(0.0)


def test_a_single_dataset_has_no_evenness():
    assert tally([0, 0, 0], [0, 0, 0], own=EYE).evenness is None
    assert tally([0, 0, 0], [-1, -1, -1], own=EYE).evenness is None


def test_two_experts_per_token_leave_less_room():
    gate = TopKGate(2)
    # all tokens on experts 0 and 1: log 2 of entropy, the least possible
    pair = torch.tensor([[3.0, 2.0, 0.0, 0.0]]).expand(6, 4)
    record = dataclasses.replace(make_record([0] * 6), assignment=gate(pair))
    collapsed = LayerTally.of(record)
    assert collapsed.share_E.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert collapsed.evenness == pytest.approx(0.0)
    # half of them on 2 and 3
    both = torch.cat([pair[:3], pair[:3].flip(1)])
    record = dataclasses.replace(record, assignment=gate(both))
    assert LayerTally.of(record).evenness == pytest.approx(1.0)


def test_gates_that_fill_their_experts_by_themselves_never_collapse():
    chosen = tally([0] * 8, gate=ExpertChoiceGate(share=0.25))
    assert chosen.evenness == pytest.approx(1.0)
    assert tally([0] * 8, gate=DenseSoftmaxGate()).evenness is None


def test_unused_experts_are_those_whose_datasets_were_seen():
    assert tally([0, 0, 2]).unused == [1, 3]
    # groups 2 and 3 have no tokens
    assert tally([0, 0, 0], [0, 1, 1], own=EYE).unused == [1]


def test_steps_add_up_and_are_taken_once():
    kept = RoutingTally()
    kept.add({"a": make_record([0, 1]), "b": make_record([3])})
    kept.add({"a": make_record([1, 1, 2])})
    taken = kept.take()
    assert taken["a"].counts_GE.tolist() == [[1, 3, 1, 0]]
    assert taken["a"].tokens_G.tolist() == [5]
    assert taken["b"].tokens_G.tolist() == [1]
    assert kept.take() == {}
