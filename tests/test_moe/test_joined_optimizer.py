"""Tests of damex.moe.joined_optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from damex.moe import JoinedOptimizer, NormalizedGD


def make(*, seed=0, lr=0.1):
    torch.manual_seed(seed)
    dense, bank = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 3))
    joined = JoinedOptimizer(
        torch.optim.AdamW([dense], lr=0.01), NormalizedGD([bank], lr=lr)
    )
    return dense, bank, joined


def set_grads(dense, bank, seed=1):
    generator = torch.Generator().manual_seed(seed)
    dense.grad = torch.randn(3, generator=generator)
    bank.grad = torch.randn(2, 3, generator=generator)


def test_each_part_moves_as_its_own_optimiser_does():
    dense, bank, joined = make()
    alone, start = copy.deepcopy(dense), bank.detach().clone()
    plain = torch.optim.AdamW([alone], lr=0.01)
    for seed in range(3):
        set_grads(dense, bank, seed)
        alone.grad = dense.grad.clone()
        joined.step()
        plain.step()
    assert torch.equal(dense, alone)
    set_grads(dense, bank)
    before = bank.detach().clone()
    joined.step()
    torch.testing.assert_close((bank - before).norm(dim=1), torch.full((2,), 0.1))
    assert not torch.equal(before, start)


def test_learning_rates_of_both_follow_the_groups_also_after_loading():
    _, _, other = make(lr=0.5)
    dense, bank, joined = make()
    joined.load_state_dict(other.state_dict())
    assert [group["lr"] for group in joined.param_groups] == [0.01, 0.5]
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


def test_groups_keep_their_own_options_and_gradients_are_cleared():
    dense, bank, joined = make()
    assert "betas" in joined.param_groups[0]
    assert "betas" not in joined.param_groups[1]
    assert joined.defaults["lr"] == 0.01
    set_grads(dense, bank)
    joined.zero_grad()
    assert dense.grad is None
    assert bank.grad is None


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


def test_a_parameter_has_one_optimiser():
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="more than one parameter group"):
        JoinedOptimizer(torch.optim.SGD([weight], lr=0.1), NormalizedGD([weight]))


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
