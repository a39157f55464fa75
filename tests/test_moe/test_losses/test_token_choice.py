"""Tests of losses that count foreground tokens only."""

from __future__ import annotations

import math

import pytest
import torch

from damex.moe import (
    DatasetRoutingLoss,
    ExpertCapacity,
    ImportanceLoss,
    LoadBalanceLoss,
    LoadLoss,
    RoutingRecord,
    TopKGate,
)

LOG3 = math.log(3.0)
LOSSES = [DatasetRoutingLoss, ImportanceLoss, LoadLoss, LoadBalanceLoss]


def make(logits_TE, foreground, *, mask=None, gate=None):
    """A record of one image of group 1, whose expert is 1."""
    mask_T = None if mask is None else torch.tensor(mask)
    mask_BN = None if mask_T is None else mask_T.unsqueeze(0)
    return RoutingRecord(
        logits_TE=logits_TE,
        token_mask_T=mask_T,
        group_ids_T=torch.ones(len(logits_TE), dtype=torch.int64),
        assignment=(gate or TopKGate(1))(logits_TE.unsqueeze(0), mask_BN),
        group_experts_GE=torch.eye(2, dtype=torch.bool),
        foreground_T=None if foreground is None else torch.tensor(foreground),
    )


# Probabilities (3/4, 1/4), (1/4, 3/4), (1/2, 1/2).
LOGITS = torch.tensor([[LOG3, 0.0], [0.0, LOG3], [0.0, 0.0]])


def test_dataset_loss_of_foreground_tokens_by_hand():
    record = make(LOGITS, [True, False, True])
    # -log 1/4 and -log 1/2, mean: log(8) / 2
    loss = DatasetRoutingLoss(tokens="foreground")(record)
    assert loss.item() == pytest.approx(math.log(8.0) / 2)
    # with the middle one: -log 3/4 more
    every = DatasetRoutingLoss()(record)
    assert every.item() == pytest.approx(math.log(8.0 * 4 / 3) / 3)


def test_importance_of_foreground_tokens_by_hand():
    # Sums (3/4, 1/4): mean 1/2, variance 1/16, squared 1/4.
    record = make(LOGITS, [True, False, False])
    loss = ImportanceLoss(tokens="foreground")(record)
    assert loss.item() == pytest.approx(0.25)
    assert ImportanceLoss()(record).item() == pytest.approx(0.0, abs=1e-6)


def test_load_balance_of_foreground_tokens_by_hand():
    record = make(LOGITS, [True, False, True])
    # Both go to expert 0 (ties to the lowest); P_0 = (3/4 + 1/2) / 2 = 5/8; times 2.
    loss = LoadBalanceLoss(tokens="foreground")(record)
    assert loss.item() == pytest.approx(2 * 5 / 8)
    # All: f = (2/3, 1/3), P = (1/2, 1/2).
    assert LoadBalanceLoss()(record).item() == pytest.approx(1.0)


@pytest.mark.parametrize("tokens", ["all", "foreground"])
def test_load_balance_counts_the_demand_of_dropped_tokens(tokens):
    logits = LOGITS[[0, 0, 0, 1]]
    gate = TopKGate(1, capacity=ExpertCapacity(factor=0.5))  # one place each
    record = make(logits, [True, True, False, True], gate=gate)
    free = make(logits, [True, True, False, True])
    assert record.assignment.counts_E.tolist() == [1, 1]
    loss = LoadBalanceLoss(tokens=tokens)
    torch.testing.assert_close(loss(record), loss(free))


@pytest.mark.parametrize("loss", LOSSES)
def test_foreground_is_the_loss_of_those_tokens_alone(loss):
    torch.manual_seed(0)
    logits = torch.randn(20, 2)
    foreground = (torch.arange(20) % 3 == 0).tolist()
    some = loss(tokens="foreground")(make(logits, foreground))
    alone = loss()(make(logits[::3], None))
    torch.testing.assert_close(some, alone)
    assert not torch.isclose(some, loss()(make(logits, None)))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_padded_token_is_no_foreground(loss):
    torch.manual_seed(0)
    logits = torch.randn(6, 2)
    mask = [True, True, True, True, False, False]
    foreground = [True, False, True, True, True, False]
    padded = loss(tokens="foreground")(make(logits, foreground, mask=mask))
    short = loss(tokens="foreground")(make(logits[:4], foreground[:4]))
    torch.testing.assert_close(padded, short)


@pytest.mark.parametrize("loss", LOSSES)
def test_without_foreground_the_loss_is_zero_with_a_graph(loss):
    logits = torch.randn(4, 2, requires_grad=True)
    value = loss(tokens="foreground")(make(logits, [False] * 4))
    assert value.item() == 0.0
    value.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("loss", LOSSES)
def test_errors_name_the_loss(loss):
    with pytest.raises(ValueError, match=f"{loss.__name__}: .*needs foreground_T"):
        loss(tokens="foreground")(make(LOGITS, None))
    with pytest.raises(ValueError, match=f"{loss.__name__}: unknown tokens 'objects'"):
        loss(tokens="objects")
