"""Tests of damex.moe.optim."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from damex.moe import (
    ChainedOptimizer,
    FFNExperts,
    NormalizedGD,
    copy_expert_to_all,
    decay_to_mean,
    expert_parameters,
)
from tests.test_moe.layers import D
from tests.test_moe.layers import make_layer as any_layer


def make_layer(**options):
    experts = lambda e: FFNExperts(e, D, 6, activation="cubic")  # noqa: E731
    return any_layer(experts=experts, num_experts=3, **BARE | options)


def movement_E(before, after):
    """How far each expert moved, in Frobenius norm over all of its tensors."""
    squares = [
        (new - old).double().flatten(1).square().sum(1)
        for old, new in zip(before, after, strict=True)
    ]
    return sum(squares).sqrt()


BARE = dict(group_experts=None, losses=())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_step_by_hand(scale):
    weight = nn.Parameter(torch.tensor([[[1.0, 1.0]], [[1.0, 1.0]], [[1.0, 1.0]]]))
    bias = nn.Parameter(torch.zeros(3, 1))
    weight.grad = torch.tensor([[[2.0, 3.0]], [[0.0, 0.0]], [[0.0, 4.0]]])
    bias.grad = torch.tensor([[6.0], [0.0], [3.0]])
    for one in (weight, bias):
        one.grad *= scale
    optimizer = NormalizedGD([weight, bias], lr=0.7)
    optimizer.step()
    # norms: sqrt(4 + 9 + 36) = 7, 0 and sqrt(16 + 9) = 5
    expected = torch.tensor([[[0.8, 0.7]], [[1.0, 1.0]], [[1.0, 1.0 - 0.56]]])
    torch.testing.assert_close(weight.detach(), expected)
    torch.testing.assert_close(bias.detach(), torch.tensor([[-0.6], [0.0], [-0.42]]))


def test_a_nan_gradient_is_not_hidden():
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.tensor([[math.nan, 0.0], [1.0, 0.0]])
    NormalizedGD([weight], lr=1.0).step()
    assert weight[0].isnan().all()
    assert weight[1].tolist() == [-1.0, 0.0]


def test_every_expert_with_tokens_moves_by_exactly_lr_and_the_others_not_at_all():
    layer = make_layer()
    with torch.no_grad():
        layer.router.bias_E.copy_(torch.tensor([0.0, 0.0, -99.0]))
    groups, others = expert_parameters(layer)
    assert [*map(id, groups[0]["params"])] == [*map(id, layer.experts.parameters())]
    assert [*map(id, others)] == [*map(id, layer.router.parameters())]
    optimizer = NormalizedGD(groups, lr=0.01)
    before = [p.detach().clone() for p in layer.experts.parameters()]
    out, record = layer(torch.randn(2, 20, D))
    (1e-6 * out.square().sum()).backward()
    optimizer.step()
    assert record.assignment.counts_E.tolist()[2] == 0 < record.assignment.counts_E[0]
    moved = movement_E(before, layer.experts.parameters())
    expected = torch.tensor([0.01, 0.01, 0.0], dtype=torch.float64)
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=0)


def test_layers_are_normalised_apart_and_gradients_may_be_missing():
    model = nn.ModuleList([make_layer(), make_layer()])
    groups, _ = expert_parameters(model)
    optimizer = NormalizedGD(groups, lr=0.5)
    optimizer.step()  # no gradient anywhere yet
    before = [p.detach().clone() for p in model[0].experts.parameters()]
    tokens = torch.randn(2, 50, D)
    total = model[0](tokens)[0].square().sum() + 1e3 * model[1](tokens)[0].sum()
    total.backward()
    optimizer.step()
    moved = movement_E(before, model[0].experts.parameters())
    torch.testing.assert_close(moved, torch.full((3,), 0.5, dtype=torch.float64))


def make(*, seed=0, lr=0.1):
    torch.manual_seed(seed)
    dense, bank = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 3))
    joined = ChainedOptimizer(
        torch.optim.AdamW([dense], lr=0.01), NormalizedGD([bank], lr=lr)
    )
    return dense, bank, joined


def set_grads(dense, bank, seed=1):
    generator = torch.Generator().manual_seed(seed)
    dense.grad = torch.randn(3, generator=generator)
    bank.grad = torch.randn(2, 3, generator=generator)


def test_learning_rates_of_both_follow_the_groups_also_after_loading():
    _, _, other = make(lr=0.5)
    dense, bank, joined = make()
    joined.load_state_dict(other.state_dict())
    assert [group["lr"] for group in joined.param_groups] == [0.01, 0.5]
    assert "betas" in joined.param_groups[0]
    assert "betas" not in joined.param_groups[1]
    assert joined.defaults["lr"] == 0.01
    for group in joined.param_groups:
        group["lr"] *= 0.5
    set_grads(dense, bank)
    before = bank.detach().clone()
    joined.step()
    torch.testing.assert_close((bank - before).norm(dim=1), torch.full((2,), 0.25))


def test_a_loaded_optimiser_goes_on_bit_by_bit():
    dense, bank, joined = make()
    for seed in range(3):
        set_grads(dense, bank, seed)
        joined.step()
    again, bank_again, resumed = make()
    with torch.no_grad():
        again.copy_(dense)
        bank_again.copy_(bank)
    resumed.load_state_dict(copy.deepcopy(joined.state_dict()))
    for seed in range(3, 6):
        for parameters, optimizer in [
            ((dense, bank), joined),
            ((again, bank_again), resumed),
        ]:
            set_grads(*parameters, seed)
            optimizer.step()
    assert torch.equal(dense, again)
    assert torch.equal(bank, bank_again)


def test_a_closure_is_called_once():
    dense, bank, joined = make()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        set_grads(dense, bank)
        return 2.0

    with torch.no_grad():
        assert joined.step(closure) == 2.0
    assert calls == [True]


def test_a_gradient_scaler_skips_both_on_overflow_and_unscales_for_both():
    dense, bank, joined = make()
    plain = copy.deepcopy(dense)
    alone = torch.optim.AdamW([plain], lr=0.01)
    start = bank.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((dense.sum() + bank.sum()) * torch.inf).backward()
    scaler.step(joined)
    scaler.update()
    assert torch.equal(bank, start)
    assert torch.equal(dense, plain)
    joined.zero_grad()
    scaler.scale(dense.square().sum() + bank.sum()).backward()
    scaler.step(joined)
    plain.square().sum().backward()
    alone.step()
    torch.testing.assert_close(dense, plain)
    torch.testing.assert_close((bank - start).norm(dim=1), torch.full((2,), 0.1))


def test_decay_to_the_mean_by_hand():
    weight = nn.Parameter(torch.tensor([[1.0, 0.0], [3.0, 0.0], [8.0, 6.0]]))
    decay_to_mean(weight, 0.25)  # the mean is (4, 2)
    assert weight.tolist() == [[1.75, 0.5], [3.25, 0.5], [7.0, 5.0]]
    decay_to_mean(weight, 0.0)
    assert weight.tolist() == [[1.75, 0.5], [3.25, 0.5], [7.0, 5.0]]
    decay_to_mean(weight, 1.0)
    assert weight.tolist() == [[4.0, 2.0]] * 3
    parts = nn.Parameter(torch.tensor([[1.0], [10.0], [3.0], [30.0]]))
    decay_to_mean(parts, 0.5, parts=2)  # with the same part of the other copies
    assert parts.tolist() == [[1.5], [15.0], [2.5], [25.0]]


@pytest.mark.parametrize("chained", [False, True])
def test_all_experts_become_copies_of_one_with_its_moments(chained):
    layer = make_layer()
    layer.experts.register_buffer("scale", torch.tensor([7.0, 8.0, 9.0]))
    banks, others = expert_parameters(layer)
    optimizer = torch.optim.AdamW(layer.parameters())
    if chained:
        optimizer = ChainedOptimizer(torch.optim.SGD(others), torch.optim.AdamW(banks))
    for parameter in layer.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    state = (optimizer.second if chained else optimizer).state
    before = {
        name: [p.detach().clone(), p.grad.clone(), state[p]["exp_avg"].clone()]
        for name, p in layer.experts.named_parameters()
    }
    copy_expert_to_all(layer.experts, expert=1, optimizer=optimizer)
    assert layer.experts.scale.tolist() == [8.0] * 3
    for name, p in layer.experts.named_parameters():
        after = (p, p.grad, state[p]["exp_avg"])
        for old, new in zip(before[name], after, strict=True):
            assert torch.equal(new, old[1:2].expand_as(old)), name
        assert state[p]["step"] == 1
