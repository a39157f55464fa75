"""Tests of damex.moe.gates.dense_softmax."""

from __future__ import annotations

import math

import torch

from damex.moe import DenseSoftmaxGate


def test_every_token_goes_to_every_expert_by_hand():
    # softmax of (log 3, 0, 0): 3/5, 1/5, 1/5
    logits = torch.tensor([[[math.log(3.0), 0.0, 0.0], [0.0, 0.0, math.log(3.0)]]])
    assignment = DenseSoftmaxGate()(logits)
    assert assignment.token_index_R.tolist() == [0, 1, 0, 1, 0, 1]
    assert assignment.expert_index_R.tolist() == [0, 0, 1, 1, 2, 2]
    expected = torch.tensor([0.6, 0.2, 0.2, 0.2, 0.2, 0.6])
    torch.testing.assert_close(assignment.weight_R, expected)
    assert assignment.routes_per_token == 3


def test_padding_gets_no_route():
    mask = torch.tensor([[True, False], [False, True]])
    assignment = DenseSoftmaxGate()(torch.zeros(2, 2, 3), mask)
    assert assignment.token_index_R.tolist() == [0, 3] * 3
    assert assignment.num_tokens == 4


def test_weights_are_smooth_in_the_logits():
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: DenseSoftmaxGate()(x).weight_R, logits)


def test_a_common_shift_of_the_logits_changes_nothing():
    logits = torch.randn(2, 3, 4)
    shifted = DenseSoftmaxGate()(logits + 8.0).weight_R
    torch.testing.assert_close(shifted, DenseSoftmaxGate()(logits).weight_R)
