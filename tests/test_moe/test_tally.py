"""Tests of damex.moe.tally: what routers chose, and how evenly."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from damex.moe import (
    DenseSoftmaxGate,
    ExpertChoiceGate,
    LayerTally,
    Packing,
    RoutingRecord,
    RoutingTally,
    TopKGate,
    entropy,
)
from damex.moe.gates.balancing import ExpertCapacity


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


EYE = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_entropy_by_hand():
    assert entropy(torch.tensor([3, 3])).item() == pytest.approx(math.log(2))
    assert entropy(torch.tensor([7, 0, 0])).item() == 0.0
    assert entropy(torch.zeros(2)).item() == 0.0
    quarter = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert entropy(torch.tensor([1, 3])).item() == pytest.approx(quarter)


def test_counts_are_by_group_and_leave_unknown_groups_out():
    found = tally([0, 0, 2, 1, 3], [0, 1, 1, 1, -1], own=EYE)
    assert found.counts_GE.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [0] * 4, [0] * 4]
    assert found.tokens_G.tolist() == [1, 3, 0, 0]
    assert found.share_E.tolist() == [0.5, 0.25, 0.25, 0.0]


def test_without_a_map_all_tokens_are_one_group():
    found = tally([0, 0, 2, 1, 3], [0, 1, 1, 1, -1])
    assert found.counts_GE.tolist() == [[2, 1, 1, 1]]
    assert found.tokens_G.tolist() == [5]
    assert found.expected_E.tolist() == [0.25] * 4


def test_forced_routes_count_as_the_router_would_choose():
    record = make_record([0, 1, 2, 3], [0, 1, 2, 3], own=EYE)
    all_to_2 = torch.tensor([0.0, 0.0, 1.0, 0.0]).expand(4, 4)
    forced = dataclasses.replace(record, logits_VE=all_to_2, is_forced=True)
    assert LayerTally.of(forced).share_E.tolist() == [0.0, 0.0, 1.0, 0.0]
    free = dataclasses.replace(forced, is_forced=False)
    assert LayerTally.of(free).share_E.tolist() == [0.25] * 4


def test_what_a_capacity_drops_was_chosen_too():
    gate = TopKGate(1, capacity=ExpertCapacity(factor=1.0))
    found = tally([2] * 8, gate=gate.train())
    assert found.share_E.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert found.evenness == pytest.approx(0.0)


def test_evenness_is_the_entropy_of_the_load_beside_the_even_one():
    assert tally([0, 1, 2, 3]).evenness == pytest.approx(1.0)
    assert tally([0, 0, 1, 1]).evenness == pytest.approx(0.5)
    assert tally([3, 3, 3, 3]).evenness == pytest.approx(0.0)


def test_datasets_of_unequal_size_make_no_collapse():
    """9 of 10 tokens are of one dataset, and each goes where it belongs."""
    experts = groups = [0] * 27 + [1, 2, 3]
    assert tally(experts, groups, own=EYE).evenness == pytest.approx(1.0)
    assert tally(experts, groups).evenness < 0.4
    assert tally([0] * 30, groups, own=EYE).evenness == pytest.approx(0.0)


def test_one_dataset_alone_says_nothing():
    assert tally([0, 0, 0], [0, 0, 0], own=EYE).evenness is None
    assert tally([0, 0, 0], [-1, -1, -1], own=EYE).evenness is None


def test_two_experts_per_token_leave_less_room():
    gate = TopKGate(2)
    # all tokens on experts 0 and 1: log 2 of entropy, and no less is possible
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


def test_unused_experts_are_those_that_somebody_should_have_chosen():
    assert tally([0, 0, 2]).unused == [1, 3]
    # nobody of groups 2 and 3 was there
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


def test_groups_without_experts_are_told_apart_if_asked():
    record = make_record([0, 0, 2, 1], [0, 1, 1, -1])
    found = LayerTally.of(record, num_groups=2)
    assert found.counts_GE.tolist() == [[1, 0, 0, 0], [1, 0, 1, 0]]
    assert found.expected_E.tolist() == [0.25] * 4
