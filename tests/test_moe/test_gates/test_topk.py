"""Tests of damex.moe.gates."""

from __future__ import annotations

import math

import pytest
import torch

from damex.moe import BiasBalancer, TopKGate
from damex.papers.dense_gates import DenseSoftmaxGate

LOG3 = math.log(3.0)


def experts_by_token(assignment, k=1):
    """Expert ids per token, in token order."""
    order = torch.argsort(assignment.token_index_R, stable=True)
    return assignment.expert_index_R[order].view(-1, k)


@pytest.mark.parametrize(
    ("gate", "experts", "weights"),
    [
        (TopKGate(1), [2], [0.6]),
        (TopKGate(2), [1, 2], [0.3, 0.6]),
        (TopKGate(2, renormalize=True), [1, 2], [1 / 3, 2 / 3]),
        (DenseSoftmaxGate(), [0, 1, 2], [0.1, 0.3, 0.6]),
    ],
)
def test_choice_and_weights_by_hand(gate, experts, weights):
    logits = torch.tensor([[0.0, LOG3, math.log(6.0)]])  # probabilities .1 .3 .6
    assignment = gate(logits)
    assert assignment.expert_index_R.tolist() == experts
    torch.testing.assert_close(assignment.weight_R, torch.tensor(weights))


def test_renormalised_top1_weighs_one_and_gives_the_router_no_gradient():
    logits = torch.randn(6, 4, requires_grad=True)
    assignment = TopKGate(1, renormalize=True)(logits)
    assert (assignment.weight_R == 1).all()
    (assignment.weight_R * torch.randn(6)).sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("num_experts", [3, 40])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_ties_go_to_the_lowest_expert(k, num_experts):
    assignment = TopKGate(k)(torch.zeros(50, num_experts))
    assert assignment.counts_E.tolist() == [50] * k + [0] * (num_experts - k)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_tied_experts_weigh_one_each_and_the_router_still_learns(k):
    logits = torch.tensor([[1.0] * k + [0.5]], requires_grad=True)
    weights = TopKGate(k, renormalize=True, weight_scale=k)(logits).weight_R
    torch.testing.assert_close(weights, torch.ones(k))
    weights[0].backward()
    assert logits.grad[0, 0] > 0


def test_balance_moves_choices_and_no_weight():
    logits = torch.tensor([[LOG3, 0.0], [LOG3, 0.0]])  # probabilities 3/4, 1/4
    gate = TopKGate(1, balance=BiasBalancer(2, rate=0.3))
    assert gate(logits).expert_index_R.tolist() == [0, 0]
    gate.balance.step()  # biases -0.3, +0.3: scores 0.45 and 0.55
    assignment = gate(logits)
    assert assignment.expert_index_R.tolist() == [1, 1]
    torch.testing.assert_close(assignment.weight_R, torch.tensor([0.25, 0.25]))


@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
def test_noise_acts_in_training_only(noise):
    torch.manual_seed(0)
    logits = torch.zeros(400, 4)
    gate = TopKGate(1, noise=noise)
    counts = gate(logits).counts_E
    # 100 expected each; 5 standard deviations of a binomial(400, 1/4) are 43
    assert (counts - 100).abs().max() < 43
    gate.eval()
    assert gate(logits).counts_E.tolist() == [400, 0, 0, 0]


def test_default_noise_scales():
    # uniform noise of scale 1 can never lift expert 1 over a lead of 1.01;
    # gaussian noise of scale 1/E = 1/2 does so with chance Phi(-1.01 / 0.707) = 0.077
    torch.manual_seed(0)
    logits = torch.tensor([1.01, 0.0]).expand(2000, 2)
    assert TopKGate(1, noise="uniform")(logits).counts_E[1] == 0
    share = TopKGate(1, noise="gaussian")(logits).counts_E[1].item() / 2000
    assert abs(share - 0.077) < 0.03
    assert TopKGate(1, noise="uniform", noise_scale=4.0)(logits).counts_E[1] > 0


def test_noise_changes_choices_but_weights_stay_clean_unless_asked():
    torch.manual_seed(0)
    logits = torch.randn(64, 4)
    clean = torch.softmax(logits, -1)
    for noisy_weights in (False, True):
        gate = TopKGate(1, noise="gaussian", noise_scale=1.0)
        gate.noisy_weights = noisy_weights
        assignment = gate(logits)
        assert not torch.equal(experts_by_token(assignment)[:, 0], clean.argmax(1))
        at_route = clean[assignment.token_index_R, assignment.expert_index_R]
        same = torch.allclose(assignment.weight_R, at_route)
        assert same == (not noisy_weights)
