"""Tests of damex.moe.routing."""

import pytest
import torch

from damex.moe import Assignment, Packing, expert_groups


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


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="adds come in another order on a GPU alone"
)
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


MASK_BN = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])


def test_packing_by_hand():
    packing = Packing.of_mask(MASK_BN)
    values_BN = torch.arange(9.0).view(3, 3)
    assert packing.position_V.tolist() == [0, 2, 6, 7, 8]
    assert packing.pack(values_BN).tolist() == [0.0, 2.0, 6.0, 7.0, 8.0]
    back = packing.unpack(packing.pack(values_BN), fill=-1)
    assert back.tolist() == [[0.0, -1.0, 2.0], [-1.0] * 3, [6.0, 7.0, 8.0]]
    # the image of each real token; the second image has none
    assert packing.spread(torch.arange(3)).tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("width", [(), (4,), (2, 3)])
def test_a_full_packing_is_that_of_a_mask_without_padding(width):
    full, masked = Packing(3, 3), Packing.of_mask(torch.ones_like(MASK_BN))
    values_BN = torch.randn(3, 3, *width)
    assert torch.equal(full.pack(values_BN), masked.pack(values_BN))
    for packing in (full, masked):
        assert torch.equal(packing.unpack(packing.pack(values_BN)), values_BN)
        assert packing.spread(values_BN[:, 0]).shape == (9, *width)
    assert torch.equal(full.spread(values_BN), masked.spread(values_BN))


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
