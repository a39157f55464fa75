"""Metrics of routing, and tallies of what routers chose."""

import dataclasses
import math

import pytest
import torch

from damex.moe import (
    Assignment,
    ExpertCapacity,
    LayerTally,
    Packing,
    RoutingRecord,
    TopKGate,
    add_tallies,
    dispatch_counts,
    dispatch_entropy,
    entropy,
    mutual_information,
    routing_hits,
)
from damex.papers.dense_gates import DenseSoftmaxGate
from damex.papers.expert_choice import ExpertChoiceGate

EYE = torch.eye(4).tolist()
LOG2, LOG3 = math.log(2.0), math.log(3.0)
QUARTER = 2 * LOG2 - 0.75 * LOG3  # entropy of (1/4, 3/4)


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


def test_dispatch_counts_know_the_groups_from_the_map_and_count_all_k():
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    record = make_record([0, 0], [0, 1], own=[[1, 0, 0], [0, 1, 0]], num_experts=3)
    record = dataclasses.replace(record, assignment=TopKGate(2)(logits))
    assert dispatch_counts(record).tolist() == [[0, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    ("metric", "counts", "expected"),
    [
        # Every expert sees all four groups alike: log 4.
        (dispatch_entropy, [[5] * 3] * 4, 2 * LOG2),
        # One group per expert; the third expert is empty and skipped.
        (dispatch_entropy, [[7, 0, 0], [0, 3, 0]], 0.0),
        (dispatch_entropy, [[0] * 3] * 2, 0.0),
        # Expert 0 has half of the routes, (1, 3); expert 1 (2, 2), entropy log 2.
        (dispatch_entropy, [[1, 2], [3, 2]], 0.5 * QUARTER + 0.5 * LOG2),
        (mutual_information, [[4, 0], [0, 4]], LOG2),
        (mutual_information, [[1, 2], [3, 6]], 0.0),  # rows in proportion
        # p = (1/2, 1/4; 0, 1/4), p_g = (3/4, 1/4), p_e = (1/2, 1/2):
        # 1/2 log(4/3) + 1/4 log(2/3) + 1/4 log 2
        (mutual_information, [[2, 1], [0, 1]], 1.5 * LOG2 - 0.75 * LOG3),
        (mutual_information, [[0, 0], [0, 0]], 0.0),
        (entropy, [3, 3], LOG2),
        (entropy, [7, 0, 0], 0.0),
        (entropy, [0, 0], 0.0),
        (entropy, [1, 3], QUARTER),
    ],
)
def test_entropies_by_hand(metric, counts, expected):
    assert metric(torch.tensor(counts)).item() == pytest.approx(expected, abs=1e-9)


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
    for metric in (dispatch_counts, routing_hits):
        for record in (make_record([0]), make_record([0], [0])):
            with pytest.raises(ValueError, match="metrics: the routing record needs"):
                metric(record)


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


CAPPED = TopKGate(1, capacity=ExpertCapacity(factor=1.0))
BY_GROUP = [0] * 27 + [1, 2, 3]  # 9 of 10 tokens are of one dataset


@pytest.mark.parametrize(
    ("experts", "options", "evenness", "unused"),
    [
        ([0, 1, 2, 3], {}, 1.0, []),
        ([0, 0, 1, 1], {}, 0.5, [2, 3]),
        ([3, 3, 3, 3], {}, 0.0, [0, 1, 2]),
        ([2] * 8, dict(gate=CAPPED), 0.0, [0, 1, 3]),  # dropped routes were chosen too
        ([0] * 8, dict(gate=ExpertChoiceGate(share=0.25)), 1.0, []),
        ([0] * 8, dict(gate=DenseSoftmaxGate()), None, []),
        # Relative to the load expected of datasets of unequal size.
        (BY_GROUP, dict(groups=BY_GROUP, own=EYE), 1.0, []),
        (BY_GROUP, dict(groups=BY_GROUP), 0.3137, []),
        ([0] * 30, dict(groups=BY_GROUP, own=EYE), 0.0, [1, 2, 3]),
        ([0] * 3, dict(groups=[0] * 3, own=EYE), None, []),  # a single dataset
        ([0] * 3, dict(groups=[-1] * 3, own=EYE), None, []),
        ([0] * 3, dict(groups=[0, 1, 1], own=EYE), 0.0, [1]),
    ],
)
def test_evenness_and_unused_experts(experts, options, evenness, unused):
    found = tally(experts, **options)
    assert found.evenness == pytest.approx(evenness, abs=1e-4)
    assert found.unused == unused


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


def test_steps_add_up():
    taken = {}
    for experts in (dict(a=[0, 1], b=[3]), dict(a=[1, 1, 2])):
        add_tallies(taken, {name: tally(row) for name, row in experts.items()})
    assert taken["a"].counts_GE.tolist() == [[1, 3, 1, 0]]
    assert taken["a"].tokens_G.tolist() == [5]
    assert taken["b"].tokens_G.tolist() == [1]
