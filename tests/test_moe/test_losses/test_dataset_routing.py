"""Tests of damex.moe.losses.dataset_routing."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from damex.moe import DatasetRoutingLoss, RoutingRecord, TopKGate, dataset_routing_loss


def one_hot(*experts, num_experts):
    return functional.one_hot(torch.tensor(experts), num_experts).bool()


def record_of(logits_TE, group_ids_T, group_experts_GE, mask_T=None):
    mask_BN = None if mask_T is None else mask_T.unsqueeze(0)
    return RoutingRecord(
        logits_TE=logits_TE,
        token_mask_T=mask_T,
        group_ids_T=group_ids_T,
        assignment=TopKGate(1)(logits_TE.unsqueeze(0), mask_BN),
        group_experts_GE=group_experts_GE,
    )


def test_by_hand():
    # probabilities: token 0 (1/6, 2/6, 3/6), token 1 (1/4, 1/4, 2/4)
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 2.0]]).log()
    target = torch.tensor([[False, False, True], [True, True, False]])
    # token 0 may use expert 2: -log 1/2; token 1 experts 0 and 1: -log 1/2
    torch.testing.assert_close(
        dataset_routing_loss(logits, target), torch.tensor(math.log(2.0))
    )
    # token 0 alone with experts 1 and 2: -log 5/6
    target = torch.tensor([[False, True, True], [True, True, False]])
    torch.testing.assert_close(
        dataset_routing_loss(logits, target, torch.tensor([True, False])),
        torch.tensor(math.log(6 / 5)),
    )


def test_one_expert_is_plain_cross_entropy_in_value_and_gradient():
    logits = torch.randn(9, 5, requires_grad=True)
    targets = torch.randint(5, (9,))
    ours = dataset_routing_loss(logits, functional.one_hot(targets, 5).bool())
    theirs = functional.cross_entropy(logits, targets)
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads)


def test_all_experts_allowed_costs_nothing():
    logits = torch.randn(4, 3, requires_grad=True)
    loss = dataset_routing_loss(logits, torch.ones(4, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(4, 3))


def test_tokens_without_a_known_dataset_take_no_part():
    logits = torch.randn(4, 3, requires_grad=True)
    group_experts = one_hot(0, 2, num_experts=3)
    record = record_of(logits, torch.tensor([1, -1, 0, -1]), group_experts)
    loss = DatasetRoutingLoss()(record)
    expected = functional.cross_entropy(logits[[0, 2]], torch.tensor([2, 0]))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert torch.equal(logits.grad[[1, 3]], torch.zeros(2, 3))


def test_padded_rows_do_not_count_even_if_nan():
    logits = torch.randn(4, 3)
    padded = torch.cat([logits[:2], torch.full((3, 3), torch.nan), logits[2:]])
    padded.requires_grad_()
    mask = torch.tensor([True, True, False, False, False, True, True])
    target = one_hot(0, 1, 2, 0, num_experts=3)
    padded_target = one_hot(0, 1, 1, 1, 1, 2, 0, num_experts=3)
    loss = dataset_routing_loss(padded, padded_target, mask)
    assert torch.equal(loss, dataset_routing_loss(logits, target))
    loss.backward()
    assert torch.equal(padded.grad[~mask], torch.zeros(3, 3))


@pytest.mark.parametrize("valid", [None, torch.zeros(3, dtype=torch.bool)])
def test_zero_with_graph_when_no_token_takes_part(valid):
    logits = torch.randn(3, 2, requires_grad=True)
    target = torch.ones(3, 2) == (2 if valid is None else 1)
    loss = dataset_routing_loss(logits, target, valid)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(3, 2))


def test_computed_in_float32():
    logits = torch.randn(64, 8).to(torch.bfloat16)
    target = functional.one_hot(torch.randint(8, (64,)), 8).bool()
    loss = dataset_routing_loss(logits, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, dataset_routing_loss(logits.float(), target))


def test_confident_right_and_wrong_routers_stay_finite():
    logits = torch.tensor([[500.0, -500.0]], requires_grad=True)
    right = dataset_routing_loss(logits, one_hot(0, num_experts=2))
    wrong = dataset_routing_loss(logits, one_hot(1, num_experts=2))
    assert (right.item(), wrong.item()) == (0.0, 1000.0)
    wrong.backward()
    assert logits.grad.tolist() == [[1.0, -1.0]]
