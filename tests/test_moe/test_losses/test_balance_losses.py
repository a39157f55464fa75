"""Tests of the losses that need no dataset: balance, importance, load and z."""

from __future__ import annotations

import math

import pytest
import torch

from damex.moe import (
    Assignment,
    ImportanceLoss,
    LoadBalanceLoss,
    LoadLoss,
    RouterZLoss,
    RoutingRecord,
    TopKGate,
    importance_loss,
    load_balance_loss,
    load_loss,
    router_z_loss,
)

LOSSES = {
    "load_balance": LoadBalanceLoss(),
    "importance": ImportanceLoss(),
    "load": LoadLoss(),
    "router_z": RouterZLoss(),
}


def record_of(logits_TE, mask_T=None, k=1):
    mask_BN = None if mask_T is None else mask_T.unsqueeze(0)
    return RoutingRecord(
        logits_TE=logits_TE,
        token_mask_T=mask_T,
        group_ids_T=None,
        assignment=TopKGate(k)(logits_TE.unsqueeze(0), mask_BN),
    )


def test_load_balance_by_hand():
    # probabilities (3/4, 1/4) and (1/4, 3/4) and (2/4, 2/4); mean P = (1/2, 1/2)
    logits = torch.tensor([[3.0, 1.0], [1.0, 3.0], [1.0, 1.0]]).log()
    counts = torch.tensor([2, 1])
    # 2 * (2/3 * 1/2 + 1/3 * 1/2) = 1
    assert load_balance_loss(logits, counts).item() == pytest.approx(1.0)
    # first token alone: P = (3/4, 1/4), f = (1, 0): 2 * 3/4
    valid = torch.tensor([True, False, False])
    loss = load_balance_loss(logits, torch.tensor([1, 0]), valid)
    assert loss.item() == pytest.approx(1.5)


def test_load_balance_of_logits_by_hand():
    logits = torch.tensor([[3.0, 1.0], [2.0, 4.0]], requires_grad=True)
    counts = torch.tensor([3, 1])
    # mean logits (2.5, 2.5), f = (3/4, 1/4): 2 * 2.5; gradient 2 * f_e / 2 tokens
    loss = load_balance_loss(logits, counts, scores="logit")
    assert loss.item() == pytest.approx(5.0)
    loss.backward()
    assert logits.grad.tolist() == [[0.75, 0.25], [0.75, 0.25]]
    # as a part of a layer: tokens go to experts 0 and 1, so f = (1/2, 1/2)
    record = record_of(torch.tensor([[3.0, 1.0], [2.0, 5.0]]))
    assert LoadBalanceLoss(scores="logit")(record).item() == pytest.approx(5.5)
    with pytest.raises(ValueError, match="unknown scores 'odds'"):
        LoadBalanceLoss(scores="odds")


@pytest.mark.parametrize("k", [1, 2])
def test_load_balance_extremes(k):
    balanced = load_balance_loss(torch.zeros(8, 4), torch.tensor([2 * k] * 4))
    assert balanced.item() == pytest.approx(1.0)
    collapsed = torch.full((8, 4), -50.0)
    collapsed[:, 2] = 50.0
    loss = load_balance_loss(collapsed, torch.tensor([0, 0, 8, 0]))
    assert loss.item() == pytest.approx(4.0)


def test_load_balance_can_fall_below_one():
    # P = (0.3825, 0.6175) and f = (3/4, 1/4) disagree: 2 * (.286875 + .154375)
    probs = torch.tensor([[0.51, 0.49]] * 3 + [[0.0, 1.0]])
    record = record_of(probs.log().clamp_min(-100))
    assert LoadBalanceLoss()(record).item() == pytest.approx(0.8825, abs=1e-4)


def test_importance_by_hand():
    # importance (3/4 + 1/4 + 3/4, 1/4 + 3/4 + 1/4) = (1.75, 1.25): mean 1.5,
    # population variance 0.0625, CV^2 = 0.0625 / 2.25 = 0.027778
    logits = torch.tensor([[3.0, 1.0], [1.0, 3.0], [3.0, 1.0]]).log()
    assert importance_loss(logits).item() == pytest.approx(0.0625 / 2.25)
    # one of three has it all: importance (1, 0, 0), mean 1/3, variance 2/9, CV^2 = 2
    collapsed = torch.tensor([[90.0, -90.0, -90.0]])
    assert importance_loss(collapsed).item() == pytest.approx(2.0)
    assert importance_loss(torch.zeros(5, 1)).item() == 0.0


def test_load_by_hand():
    # E = 2, k = 1, std 0.5; token (1, 0): threshold 1, chances Phi(0) = 0.5 and
    # Phi(-2) = 0.0227501; mean 0.2613751, deviation 0.2386249, squared ratio 0.833498
    loss = load_loss(torch.tensor([[1.0, 0.0]]), k=1, noise_std=0.5)
    assert loss.item() == pytest.approx(0.833498, abs=1e-5)
    # k = 2: the threshold is the lower logit 0, chances Phi(2) = 0.9772499 and 0.5;
    # mean 0.7386249, deviation 0.2386249, squared ratio 0.104371
    loss = load_loss(torch.tensor([[1.0, 0.0]]), k=2, noise_std=0.5)
    assert loss.item() == pytest.approx(0.104371, abs=1e-5)
    # two tokens that mirror each other are balanced
    mirror = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert load_loss(mirror, k=1, noise_std=0.5).item() == pytest.approx(0.0)


def test_load_default_noise_is_that_of_the_gate():
    logits = torch.randn(6, 4)
    expected = load_loss(logits, k=2, noise_std=0.25)
    assert torch.equal(LoadLoss()(record_of(logits, k=2)), expected)


def test_router_z_by_hand():
    # logsumexp(log 1, log 3) = log 4; logsumexp(0, 0) = log 2
    logits = torch.tensor([[1.0, 3.0], [1.0, 1.0]]).log()
    expected = (math.log(4) ** 2 + math.log(2) ** 2) / 2
    assert router_z_loss(logits).item() == pytest.approx(expected)
    valid = torch.tensor([False, True])
    assert router_z_loss(logits, valid).item() == pytest.approx(math.log(2) ** 2)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("amount", [1, 5])
def test_padding_does_not_count_even_if_nan(loss, amount):
    torch.manual_seed(0)
    logits = torch.randn(11, 4)
    padding = torch.full((amount, 4), torch.nan)
    padded = torch.cat([logits[:4], padding, logits[4:]]).requires_grad_()
    mask = torch.tensor([True] * 4 + [False] * amount + [True] * 7)
    reference = logits.clone().requires_grad_()
    values = [loss(record_of(padded, mask)), loss(record_of(reference))]
    assert torch.equal(*values)
    for value in values:
        value.backward()
    assert torch.equal(padded.grad[mask], reference.grad)
    assert reference.grad.abs().sum() > 0
    assert torch.equal(padded.grad[~mask], torch.zeros(amount, 4))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_zero_with_graph_without_valid_tokens(loss):
    logits = torch.randn(3, 4, requires_grad=True)
    value = loss(record_of(logits, torch.zeros(3, dtype=torch.bool)))
    value.backward()
    assert value.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(3, 4))


@pytest.mark.parametrize("name", ["load_balance", "importance"])
def test_descent_balances_a_skewed_router(name):
    loss = LOSSES[name]
    torch.manual_seed(0)
    tokens = torch.randn(200, 6)
    weight = torch.randn(6, 4, requires_grad=True)
    bias = torch.tensor([3.0, 0.0, 0.0, 0.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=1.0)
    importance = []
    for _ in range(50):
        record = record_of(tokens @ weight + bias)
        importance.append(record.probs_TE.mean(0).max().item())
        optimizer.zero_grad()
        loss(record).backward()
        optimizer.step()
    assert importance[0] > 0.5
    assert importance[-1] < 0.35


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_computed_in_float32(loss):
    logits = torch.randn(33, 4).to(torch.bfloat16)
    value = loss(record_of(logits))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(record_of(logits.float())))


def test_errors():
    with pytest.raises(ValueError, match=r"k must lie in \[1, E=2\], got 3"):
        load_loss(torch.zeros(1, 2), k=3, noise_std=1.0)
    with pytest.raises(ValueError, match=r"noise_std must be above 0, got 0.0"):
        load_loss(torch.zeros(1, 2), k=1, noise_std=0.0)
    pairs = Assignment.from_pairs(
        torch.tensor([0]),
        torch.tensor([0]),
        torch.ones(1),
        num_tokens=1,
        num_experts=2,
    )
    record = RoutingRecord(
        logits_TE=torch.zeros(1, 2),
        token_mask_T=None,
        group_ids_T=None,
        assignment=pairs,
    )
    with pytest.raises(ValueError, match="same number of experts"):
        LoadLoss()(record)
