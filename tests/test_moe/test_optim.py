"""Tests of damex.moe.optim."""

import copy
import math
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from damex.moe import (
    ChainedOptimizer,
    Muon,
    NormalizedGD,
    copy_expert_to_all,
    decay_to_mean,
    expert_parameters,
)
from damex.moe.optim import _computes_bfloat16
from tests.test_moe.layers import make_layer


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_step_by_hand(scale):
    weight = nn.Parameter(torch.tensor([[[1.0, 1.0]], [[1.0, 1.0]], [[1.0, 1.0]]]))
    bias = nn.Parameter(torch.zeros(3, 1))
    NormalizedGD([weight, bias], lr=0.7).step()  # no gradient yet
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


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
@pytest.mark.parametrize("vectors", ["AVX2", "AVX512"])  # float32 and bfloat16
def test_muon_moves_each_expert_alike_in_all_directions(shape, vectors, monkeypatch):
    """Whatever the scale of its gradient, by lr x 0.2 x the root of its longer side."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: vectors)
    torch.manual_seed(0)
    start = torch.randn(3, *shape)
    grads = torch.randn(3, *shape) * torch.tensor([1.0, 1e-6, 1e6]).view(3, 1, 1)
    bank = nn.Parameter(start.clone())
    bank.grad = grads.clone()
    Muon([bank], lr=0.5).step()
    lengths = torch.linalg.svdvals(start - bank.detach()) / (0.5 * 0.2 * 6**0.5)
    assert 0.6 < lengths.min() <= lengths.max() < 1.3
    for expert in range(3):
        alone = nn.Parameter(start[expert].clone())
        alone.grad = grads[expert].clone()
        Muon([alone], lr=0.5).step()
        torch.testing.assert_close(alone, bank[expert])


def test_muon_leaves_an_expert_without_tokens_as_it_is():
    bank = nn.Parameter(torch.ones(2, 2, 2))
    optimizer = Muon([bank], lr=0.5, weight_decay=0.1)
    bank.grad = torch.stack([torch.eye(2), torch.eye(2)])
    optimizer.step()
    moved = bank.detach().clone()
    for _ in range(50):
        bank.grad = torch.stack([torch.zeros(2, 2), torch.eye(2)])
        optimizer.step()
    assert torch.equal(bank[0], moved[0])
    assert bank[1].diagonal().max() < moved[1].diagonal().min() - 1
    mean = optimizer.state[bank]["momentum_buffer"][0]  # waits for its next tokens
    torch.testing.assert_close(mean, 0.05 * torch.eye(2))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch < 2.9 has none")
@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_is_the_one_of_torch(shape):
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    settings = dict(lr=0.1, weight_decay=0.1)
    torchs = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    both = Muon([ours], **settings), torchs
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in both:
            optimizer.step()
    moved = (theirs - 1).abs().max()
    assert (ours - theirs).abs().max() < 0.03 * moved  # bfloat16


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


def test_a_group_that_no_optimizer_would_step_is_refused():
    _, _, joined = make()
    with pytest.raises(ValueError, match="belongs to none of the two"):
        joined.add_param_group(dict(params=[nn.Parameter(torch.ones(2, 3))]))


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


def test_a_loaded_optimizer_goes_on_bit_by_bit():
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
    layer = make_layer(num_experts=3, group_experts=None, losses=())
    layer.experts.register_buffer("scale", torch.tensor([7.0, 8.0, 9.0]))
    banks, others = expert_parameters(layer)
    optimizer = torch.optim.AdamW(layer.parameters())
    if chained:
        optimizer = ChainedOptimizer(torch.optim.SGD(others), torch.optim.AdamW(banks))
    for parameter in layer.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    state = (optimizer.optimizers[1] if chained else optimizer).state
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


@pytest.mark.parametrize("native", [True, False])
def test_muon_uses_bfloat16_only_where_it_is_not_emulated(native, monkeypatch):
    """Older GPUs than Ampere emulate it; of other accelerators little is known."""
    asked = Mock(return_value=native)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", asked)
    assert _computes_bfloat16("cuda") == native
    asked.assert_called_once_with(False)  # without emulation
    assert not _computes_bfloat16("mps")
