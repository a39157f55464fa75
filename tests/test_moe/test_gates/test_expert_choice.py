"""Tests of damex.papers.expert_choice."""

import math

import pytest
import torch

from damex.moe import Packing
from damex.papers.expert_choice import ExpertChoiceGate

LOG2 = math.log(2.0)


def choose(gate, logits_BNE, mask_BN=None):
    """The routes of a batch of images, and the place of each route's token."""
    packing = Packing(*logits_BNE.shape[:2])
    if mask_BN is not None:
        packing = Packing.of_mask(mask_BN)
    assignment = gate(packing.pack(logits_BNE), packing)
    place_V = torch.arange(logits_BNE[..., 0].numel())
    if mask_BN is not None:
        place_V = packing.position_V
    return assignment, place_V[assignment.token_index_R]


def one_expert(*scores):
    return torch.tensor(scores).view(1, -1, 1)


def test_choice_and_weights_by_hand():
    # expert 0 takes tokens 2 and 0 (4 : 2), expert 1 tokens 2 and 1 (8 : 4)
    logits = torch.tensor([[LOG2, 0.0], [0.0, 2 * LOG2], [2 * LOG2, 3 * LOG2]])
    assignment = ExpertChoiceGate(num_tokens=2)(logits)
    assert assignment.expert_index_R.tolist() == [0, 0, 1, 1]
    assert assignment.token_index_R.tolist() == [2, 0, 2, 1]
    torch.testing.assert_close(assignment.weight_R * 3, torch.tensor([2.0, 1, 2, 1]))
    # over all three tokens: 4, 2 of 4 + 2 + 1 = 7; 8, 4 of 8 + 4 + 1 = 13
    weights = ExpertChoiceGate(num_tokens=2, weights="all")(logits).weight_R
    torch.testing.assert_close(weights, torch.tensor([4 / 7, 2 / 7, 8 / 13, 4 / 13]))
    # token 2 was chosen by both experts and gets the sum
    ones_R1 = torch.ones(4, 1)
    expected = torch.tensor([[1 / 3], [1 / 3], [4 / 3]])
    torch.testing.assert_close(assignment.combine(ones_R1), expected)


def test_ties_go_to_the_earliest_tokens():
    logits = torch.zeros(2, 40, 3)
    assignment, _ = choose(ExpertChoiceGate(num_tokens=3), logits)
    assert assignment.token_index_R.tolist() == [0, 1, 2, 40, 41, 42] * 3


@pytest.mark.parametrize(
    ("share", "num_tokens", "taken"),
    [(0.25, 8, 2), (0.25, 9, 3), (0.01, 5, 1), (1.0, 5, 5), (0.07, 100, 7)],
)
def test_share_is_rounded_up(share, num_tokens, taken):
    gate = ExpertChoiceGate(share=share)
    assert gate(torch.randn(num_tokens, 2)).counts_E.tolist() == [taken, taken]


def test_share_counts_real_tokens_of_each_image():
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[0], mask[1, 4:9] = True, True  # 10, 5 and 0 real tokens
    gate = ExpertChoiceGate(share=0.4)
    assignment, place_R = choose(gate, torch.randn(3, 10, 2), mask)
    image_R = place_R // 10
    # ceil(4.0), ceil(2.0) and 0, for both experts
    assert image_R.bincount(minlength=3).tolist() == [8, 4, 0]
    assert assignment.num_tokens == 15


def test_an_image_with_fewer_tokens_gives_all_of_them():
    mask = torch.tensor([[True, True, False]])
    for weights in ("selected", "all"):
        gate = ExpertChoiceGate(num_tokens=5, weights=weights)
        assignment, _ = choose(gate, one_expert(0.0, LOG2, 9.0), mask)
        assert assignment.token_index_R.tolist() == [1, 0]
        torch.testing.assert_close(assignment.weight_R, torch.tensor([2 / 3, 1 / 3]))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("weights", ["selected", "all"])
def test_an_image_of_padding_alone_gives_no_nan_gradient(weights):
    logits = torch.zeros(2, 4, 3, requires_grad=True)
    mask = torch.tensor([[False] * 4, [True] * 4])
    with torch.autograd.detect_anomaly():  # a NaN on the way is one, too
        gate = ExpertChoiceGate(num_tokens=2, weights=weights)
        assignment, _ = choose(gate, logits, mask)
        (assignment.weight_R * torch.randn(6)).sum().backward()
    assert torch.equal(logits.grad[0], torch.zeros(4, 3))
    assert logits.grad.isfinite().all()
    assert (logits.grad[1] != 0).any()


def test_weights_of_one_keep_the_choice_and_give_the_router_no_gradient():
    logits = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True] * 6, [True, False, True, False, False, False]])
    soft, _ = choose(ExpertChoiceGate(num_tokens=4), logits, mask)
    gate = ExpertChoiceGate(num_tokens=4, weights="one")
    hard, _ = choose(gate, logits.requires_grad_(), mask)
    assert torch.equal(hard.token_index_R, soft.token_index_R)
    # four of the first image's tokens and both of the second's, for three experts
    assert hard.weight_R.tolist() == [1.0] * 18
    assert not hard.weight_R.requires_grad


@pytest.mark.parametrize("weights", ["selected", "all"])
def test_weights_of_mean_one(weights):
    logits_BNE = torch.randn(2, 5, 3)
    mask_BN = torch.tensor([[True] * 5, [True, True, True, False, False]])
    plain, scaled = (
        ExpertChoiceGate(num_tokens=2, weights=weights, mean_one=mean_one)
        for mean_one in (False, True)
    )
    plain, place_R = choose(plain, logits_BNE, mask_BN)
    scaled, _ = choose(scaled, logits_BNE, mask_BN)
    # over the two tokens that were taken, or over the five and three real ones
    over_B = torch.tensor([2, 2] if weights == "selected" else [5, 3])
    expected_R = plain.weight_R * over_B[place_R // 5]
    torch.testing.assert_close(scaled.weight_R, expected_R)
