"""Tests of damex.moe.gates.bias_balancer."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from damex.moe import BiasBalancer, TopKGate


def test_bias_moves_against_the_load_by_hand():
    balance = BiasBalancer(3, rate=0.25)
    balance.observe(torch.tensor([5, 0, 1]))
    balance.observe(torch.tensor([0, 0, 3]))
    assert torch.equal(balance.bias_E, torch.zeros(3))
    balance.step()  # load 5, 0, 4 around a mean of 3
    assert balance.bias_E.tolist() == [-0.25, 0.25, -0.25]
    balance.step()  # nothing seen since
    assert balance.bias_E.tolist() == [-0.25, 0.25, -0.25]
    balance.observe(torch.tensor([2, 3, 1]))
    balance.step()  # expert 0 is at the mean and stays
    assert balance.bias_E.tolist() == [-0.25, 0.0, 0.0]


def test_scores_are_probabilities_plus_bias():
    balance = BiasBalancer(2)
    balance.bias_E.copy_(torch.tensor([0.5, -0.5]))
    logits = torch.zeros(1, 2, requires_grad=True)
    scores = balance(logits)
    assert scores.tolist() == [[1.0, 0.0]]
    assert not scores.requires_grad


def test_load_of_all_processes_counts(monkeypatch):
    others = torch.tensor([0, 9])
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "all_reduce", lambda counts: counts.add_(others))
    balance = BiasBalancer(2, rate=1.0)
    balance.observe(torch.tensor([5, 1]))
    balance.step()  # 5 and 10
    assert balance.bias_E.tolist() == [1.0, -1.0]


def test_a_gathered_load_is_closed_until_the_step():
    balance = BiasBalancer(2, rate=1.0)
    balance.observe(torch.tensor([5, 1]))
    balance.gather()
    assert balance.counts_E.tolist() == [5, 1]
    balance.observe(torch.tensor([0, 9]))  # as activation recomputation does
    balance.step()
    assert balance.bias_E.tolist() == [-1.0, 1.0]
    balance.observe(torch.tensor([0, 9]))  # of the next step
    balance.step()
    assert balance.bias_E.tolist() == [0.0, 0.0]


def test_only_training_counts_and_only_real_tokens():
    gate = TopKGate(1, balance=BiasBalancer(2))
    logits = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    mask = torch.tensor([[True, True, False]])
    gate(logits, mask)
    gate.eval()(logits)
    gate.balance.gather()
    assert gate.balance.counts_E.tolist() == [1, 1]


def test_a_collapsed_router_becomes_balanced():
    torch.manual_seed(0)
    logits = torch.randn(1, 400, 4) + torch.tensor([3.0, 0.0, 0.0, 0.0])
    gate = TopKGate(1, balance=BiasBalancer(4, rate=0.01))
    assert gate(logits).counts_E.max() > 300
    for _ in range(200):
        gate(logits)
        gate.balance.step()
    assert gate(logits).counts_E.max() < 120  # 100 each would be even


def test_a_resumed_balance_goes_on_with_the_load_it_had_seen():
    balance, resumed = BiasBalancer(2), BiasBalancer(2)
    balance.observe(torch.tensor([5, 1]))
    balance.gather()
    resumed.load_state_dict(balance.state_dict())
    for one in (balance, resumed):
        one.step()
    assert torch.equal(resumed.bias_E, balance.bias_E)
    assert resumed.bias_E[1] > 0


def test_errors():
    with pytest.raises(ValueError, match=r"positive, got 0 and 0.001"):
        BiasBalancer(0)
    with pytest.raises(ValueError, match=r"positive, got 2 and 0.0"):
        BiasBalancer(2, rate=0.0)
    with pytest.raises(ValueError, match="made for 2 experts, but the router scores 3"):
        BiasBalancer(2)(torch.zeros(1, 3))
