"""Tests of damex.moe.gates."""

import math

import pytest
import torch

from damex.moe import BiasBalancer, ExpertCapacity, TopKGate
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


# ---- capacity and balance ----


def capped(factor=1.0, k=1, **options):
    return TopKGate(k, capacity=ExpertCapacity(factor=factor), **options)


def pairs(assignment):
    return list(
        zip(
            assignment.token_index_R.tolist(),
            assignment.expert_index_R.tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "k", "expected"),
    [
        (900, 8, 1.25, 1, 141),  # ceil(900 / 8) = 113; int(141.25)
        (1100, 8, 1.25, 1, 172),  # ceil(1100 / 8) = 138; int(172.5)
        (900, 8, 1.25, 2, 282),  # 2 * 141, not int(2 * 141.25)
        (8, 8, 1.0, 1, 1),
        (9, 8, 1.0, 1, 2),  # ceil(9 / 8)
        (0, 8, 1.25, 1, 0),
    ],
)
def test_capacity_of_each_expert(tokens, experts, factor, k, expected):
    assert ExpertCapacity(factor=factor).capacity(tokens, experts, k=k) == expected


# Five tokens, all with expert 0 first; ceil(5 / 2) = a capacity of 3.
LEADS = torch.tensor([0.5, 3.0, 1.0, 2.0, 4.0])
ONE_SIDED = torch.stack([LEADS, torch.zeros(5)], dim=-1).view(5, 2)


def test_who_is_served():
    assignment = capped()(ONE_SIDED)
    assert assignment.token_index_R.tolist() == [1, 3, 4]
    assert assignment.counts_E.tolist() == [3, 0]
    assert assignment.dropped.token_index_R.tolist() == [0, 2]
    assert assignment.dropped.counts_E.tolist() == [2, 0]


def test_the_capacity_is_shared_by_the_images_of_a_batch():
    # 2 x 5 tokens, a capacity of 5: those of the leads 4, 4, 3, 3 and the first 2.
    assignment = capped()(ONE_SIDED.repeat(2, 1))
    assert assignment.token_index_R.tolist() == [1, 3, 4, 6, 9]


def test_first_choices_are_served_before_second_ones_and_weights_stay():
    # Token 0 is surer of everything, but expert 1 is its second choice.
    logits = torch.tensor([[9.0, 8.0, 0.0], [0.0, 1.0, 0.5], [0.0, 1.0, 0.4]])
    assignment = capped(factor=1.0, k=2)(logits)
    # ceil(3 / 3) = 1, times k: 2 routes. Expert 1: first choices of tokens 1 and 2.
    assert pairs(assignment) == [(0, 0), (1, 1), (2, 1), (1, 2), (2, 2)]
    assert pairs(assignment.dropped) == [(0, 1)]
    assert assignment.routes_per_token is None
    free = TopKGate(2)(logits)
    weights = dict(zip(pairs(free), free.weight_R.tolist(), strict=True))
    for routes in (assignment, assignment.dropped):
        for pair, weight in zip(pairs(routes), routes.weight_R.tolist(), strict=True):
            assert weight == pytest.approx(weights[pair])


def test_a_balance_sees_the_demand_before_the_cut():
    gate = capped(balance=BiasBalancer(2))
    gate(ONE_SIDED)
    assert gate.balance.seen_E.tolist() == [5, 0]


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


def test_a_summed_load_is_closed_until_the_step():
    balance = BiasBalancer(2, rate=1.0)
    balance.observe(torch.tensor([5, 1]))
    balance.all_reduce()
    assert balance.counts_E.tolist() == [5, 1]
    balance.observe(torch.tensor([0, 9]))  # as activation recomputation does
    balance.step()
    assert balance.bias_E.tolist() == [-1.0, 1.0]
    balance.observe(torch.tensor([0, 9]))  # of the next step
    balance.step()
    assert balance.bias_E.tolist() == [0.0, 0.0]


def test_a_step_that_never_begins_is_refused():
    gate = TopKGate(1, balance=BiasBalancer(2))
    gate.end_step()
    with pytest.raises(RuntimeError, match="call begin_step"):
        gate.end_step()


def test_only_training_counts():
    gate = TopKGate(1, balance=BiasBalancer(2))
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    gate(logits[:2])
    gate.eval()(logits)
    gate.balance.all_reduce()
    assert gate.balance.counts_E.tolist() == [1, 1]


def test_a_resumed_balance_goes_on_with_the_load_it_had_seen():
    balance, resumed = BiasBalancer(2), BiasBalancer(2)
    balance.observe(torch.tensor([5, 1]))
    balance.all_reduce()
    resumed.load_state_dict(balance.state_dict())
    for one in (balance, resumed):
        one.step()
    assert torch.equal(resumed.bias_E, balance.bias_E)
    assert resumed.bias_E[1] > 0
