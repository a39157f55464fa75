"""Tests of damex.moe.routing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from damex.moe import Assignment, RoutingRecord, TopKGate, expert_groups


def random_topk(num_tokens=7, k=2, num_experts=4, mask=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    weights, ids = scores.topk(k, dim=1)
    return (
        ids,
        weights,
        Assignment.from_topk(ids, weights, num_experts=num_experts, token_mask_T=mask),
    )


def dense_combine(ids_TK, weights_TK, mask_T, outs_ETD):
    """The definition: sum over k of weight * expert(token), token by token."""
    rows = []
    for t in range(ids_TK.shape[0]):
        row = torch.zeros(outs_ETD.shape[2])
        if mask_T is None or mask_T[t]:
            for e, w in zip(ids_TK[t].tolist(), weights_TK[t], strict=True):
                row = row + w * outs_ETD[e, t]
        rows.append(row)
    return torch.stack(rows)


def test_from_topk_by_hand():
    assignment = Assignment.from_topk(
        torch.tensor([[2, 0], [0, 1], [2, 1]]),
        torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]]),
        num_experts=4,
    )
    # expert 0: tokens 0, 1; expert 1: tokens 1, 2; expert 2: tokens 0, 2
    assert assignment.token_index_R.tolist() == [0, 1, 1, 2, 0, 2]
    assert assignment.expert_index_R.tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(
        assignment.weight_R, torch.tensor([0.3, 0.6, 0.4, 0.1, 0.7, 0.9])
    )
    assert assignment.counts_E.tolist() == [2, 2, 2, 0]
    assert assignment.counts_E.dtype == torch.int64
    assert (assignment.num_tokens, assignment.routes_per_token) == (3, 2)
    assert (assignment.num_routes, assignment.num_experts) == (6, 4)


def test_masked_tokens_get_no_route():
    mask = torch.tensor([True, False, True])
    assignment = Assignment.from_topk(
        torch.tensor([[1], [0], [0]]),
        torch.tensor([[0.5], [0.6], [0.7]]),
        num_experts=2,
        token_mask_T=mask,
    )
    assert assignment.token_index_R.tolist() == [2, 0]
    assert assignment.counts_E.tolist() == [1, 1]
    assert assignment.num_tokens == 3


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_combine_equals_its_definition(k, masked):
    mask = torch.tensor([True, False, True, True, False, True, True])
    mask = mask if masked else None
    ids, weights, assignment = random_topk(k=k, mask=mask)
    outs_ETD = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(1))
    out_RD = outs_ETD[assignment.expert_index_R, assignment.token_index_R]
    combined = assignment.combine(out_RD)
    torch.testing.assert_close(combined, dense_combine(ids, weights, mask, outs_ETD))
    if masked:
        assert (combined[~mask] == 0).all()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_from_pairs_agrees_with_from_topk_in_any_order(k):
    ids, weights, assignment = random_topk(k=k)
    tokens = torch.arange(7).repeat_interleave(k)
    shuffle = torch.randperm(7 * k, generator=torch.Generator().manual_seed(3))
    pairs = Assignment.from_pairs(
        tokens[shuffle],
        ids.flatten()[shuffle],
        weights.flatten()[shuffle],
        num_tokens=7,
        num_experts=4,
    )
    assert pairs.routes_per_token is None
    assert torch.equal(pairs.counts_E, assignment.counts_E)
    assert torch.equal(pairs.expert_index_R, assignment.expert_index_R)
    outs_ETD = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(1))
    combined = [
        a.combine(outs_ETD[a.expert_index_R, a.token_index_R])
        for a in (pairs, assignment)
    ]
    torch.testing.assert_close(*combined)


def test_from_pairs_tokens_may_have_none_or_many_routes():
    assignment = Assignment.from_pairs(
        torch.tensor([3, 1, 3]),
        torch.tensor([1, 1, 0]),
        torch.tensor([2.0, 3.0, 5.0]),
        num_tokens=4,
        num_experts=2,
    )
    out_RD = torch.tensor([[1.0], [10.0], [100.0]])
    # sorted: expert 0: token 3; expert 1: tokens 3, 1 (given order kept)
    # token 3: 5*1 + 2*10 = 25; token 1: 3*100 = 300
    assert assignment.token_index_R.tolist() == [3, 3, 1]
    assert assignment.combine(out_RD).flatten().tolist() == [0.0, 300.0, 0.0, 25.0]


def test_dispatch_copies_tokens_in_route_order():
    _, _, assignment = random_topk()
    tokens = torch.arange(7.0).unsqueeze(1)
    assert torch.equal(
        assignment.dispatch(tokens).flatten().long(), assignment.token_index_R
    )


@pytest.mark.parametrize("k", [1, 3])
def test_combine_repeats_bit_for_bit(k):
    _, _, assignment = random_topk(num_tokens=501, k=k)
    out_RD = torch.randn(501 * k, 16)
    assert torch.equal(assignment.combine(out_RD), assignment.combine(out_RD))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_combine_of_any_number_of_routes_repeats_bit_for_bit_on_a_gpu():
    # many experts on few tokens: atomic adds would come in another order every time
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 20, (4000,), generator=generator)
    experts = torch.randint(0, 8, (4000,), generator=generator)
    assignment = Assignment.from_pairs(
        tokens.cuda(),
        experts.cuda(),
        torch.rand(4000, generator=generator).cuda(),
        num_tokens=20,
        num_experts=8,
    )
    rows = torch.randn(4000, 64, generator=generator).cuda()
    first = assignment.combine(rows)
    assert all(torch.equal(assignment.combine(rows), first) for _ in range(20))


def test_combine_sums_in_float32_and_keeps_the_dtype():
    weights = torch.tensor([[0.3, 0.7]])
    assignment = Assignment.from_topk(torch.tensor([[0, 1]]), weights, num_experts=2)
    combined = assignment.combine(torch.tensor([[1.0], [3.0]], dtype=torch.bfloat16))
    assert combined.dtype == torch.bfloat16
    # 0.3 * 1 + 0.7 * 3 = 2.4, nearest bfloat16 (steps of 1/64) 154/64 = 2.40625;
    # weights and products rounded to bfloat16 would give 153/64 = 2.390625.
    assert combined.item() == 2.40625


def test_gradients_reach_outputs_and_weights():
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5]], requires_grad=True)
    ids = torch.tensor([[1, 0], [0, 1]])
    assignment = Assignment.from_topk(ids, weights, num_experts=2)
    out_RD = torch.tensor([[1.0], [2.0], [3.0], [4.0]], requires_grad=True)
    assignment.combine(out_RD).sum().backward()
    # routes sorted: (t0,e0,.75) (t1,e0,.5) (t0,e1,.25) (t1,e1,.5)
    assert out_RD.grad.flatten().tolist() == [0.75, 0.5, 0.25, 0.5]
    # weight of (t0,e1) saw output 3, (t0,e0) 1, (t1,e0) 2, (t1,e1) 4
    assert weights.grad.tolist() == [[3.0, 1.0], [2.0, 4.0]]


def test_no_tokens_and_all_masked():
    empty = torch.zeros(0, 2)
    none = Assignment.from_topk(empty.long(), empty, num_experts=3)
    assert none.combine(torch.zeros(0, 4)).shape == (0, 4)
    weights = torch.ones(5, 1, requires_grad=True)
    masked = Assignment.from_topk(
        torch.zeros(5, 1, dtype=torch.int64),
        weights,
        num_experts=3,
        token_mask_T=torch.zeros(5, dtype=torch.bool),
    )
    assert masked.counts_E.tolist() == [0, 0, 0]
    out = masked.combine(torch.zeros(0, 4))
    assert torch.equal(out, torch.zeros(5, 4))
    out.sum().backward()
    assert torch.equal(weights.grad, torch.zeros(5, 1))


def test_detached_cuts_the_graph_and_keeps_the_routes():
    weights = torch.rand(3, 1, requires_grad=True)
    ids = torch.tensor([[1], [0], [1]])
    assignment = Assignment.from_topk(ids, weights, num_experts=2)
    detached = assignment.detached()
    assert assignment.weight_R.requires_grad
    assert not detached.weight_R.requires_grad
    assert torch.equal(detached.token_index_R, assignment.token_index_R)


def test_errors_name_what_is_wrong():
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"\(3, 1\) and \(2, 1\)"):
        Assignment.from_topk(ids, weights[:2], num_experts=1)
    with pytest.raises(ValueError, match="K must be at least 1"):
        Assignment.from_topk(ids[:, :0], weights[:, :0], num_experts=1)
    with pytest.raises(ValueError, match=r"bool of shape \(3,\), got torch.int64"):
        Assignment.from_topk(ids, weights, num_experts=1, token_mask_T=ids[:, 0])
    index, one = torch.tensor([0, 4]), torch.ones(2)
    with pytest.raises(ValueError, match=r"token_index must lie in \[0, 4\).* to 4"):
        Assignment.from_pairs(index, index * 0, one, num_tokens=4, num_experts=1)
    with pytest.raises(ValueError, match=r"expert_index must lie in \[0, 3\)"):
        Assignment.from_pairs(index * 0, index, one, num_tokens=4, num_experts=3)
    with pytest.raises(ValueError, match="of one length"):
        Assignment.from_pairs(index, index, one[:1], num_tokens=9, num_experts=9)


def make_record(mask_T=None):
    logits = torch.tensor([[1.0, 3.0], [1.0, 1.0]]).log().requires_grad_()
    assignment = TopKGate(1)(logits.unsqueeze(0))
    return RoutingRecord(
        logits_TE=logits,
        token_mask_T=mask_T,
        group_ids_T=torch.tensor([0, 1]),
        assignment=assignment,
        losses={"a": logits.sum()},
    )


def test_probabilities():
    torch.testing.assert_close(
        make_record().probs_TE, torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    )


def test_valid_mask_without_and_with_mask():
    assert make_record().valid_mask().tolist() == [True, True]
    mask = torch.tensor([True, False])
    assert make_record(mask).valid_mask().tolist() == [True, False]


def test_detached_has_no_graph_and_leaves_the_original_alone():
    record = make_record()
    detached = record.detached()
    tensors = [
        detached.logits_TE,
        detached.assignment.weight_R,
        detached.losses["a"],
        detached.probs_TE,
    ]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert record.losses["a"].requires_grad
    assert record.assignment.weight_R.requires_grad
    assert torch.equal(detached.group_ids_T, record.group_ids_T)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_record().losses = {}


@pytest.mark.parametrize(
    ("groups", "experts", "expected"),
    [
        (3, 3, ((0,), (1,), (2,))),
        (2, 4, ((0, 1), (2, 3))),
        (3, 5, ((0, 1), (2, 3), (4,))),  # 5 = 1 * 3 + 2: the first two get one more
        (1, 2, ((0, 1),)),
    ],
)
def test_experts_are_shared_out_evenly_and_in_order(groups, experts, expected):
    assert expert_groups(groups, experts) == expected


@pytest.mark.parametrize(("groups", "experts"), [(3, 2), (0, 2)])
def test_groups_without_experts_are_refused(groups, experts):
    with pytest.raises(ValueError, match=f"got {groups} groups and {experts} experts"):
        expert_groups(groups, experts)
