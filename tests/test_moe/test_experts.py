"""Experts: FFNs, adapters added to a shared FFN, and parts of a dense FFN."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from damex.moe import (
    FFNExperts,
    LowRankExperts,
)
from damex.moe.experts import ACTIVATIONS

D, L, E = 8, 4, 3
ADAPTERS = {
    "low rank, split": lambda e=E: LowRankExperts(e, D, L, backend="split"),
    "low rank, grouped_mm": lambda e=E: LowRankExperts(e, D, L, backend="grouped_mm"),
}
FUNCTIONS = {
    "cubic": lambda x: x**3,
    "identity": lambda x: x,
    **{name: getattr(functional, name) for name in ("relu", "gelu", "celu", "silu")},
    **{name: getattr(torch, name) for name in ("tanh", "sigmoid", "prelu")},
}
FFNS = {
    f"{activation}, {backend}": lambda a=activation, b=backend: FFNExperts(
        E, D, 12, activation=a, backend=b
    )
    for activation in FUNCTIONS
    for backend in ("split", "grouped_mm")
}


def every(banks):
    """Parametrize by banks of experts."""
    needs = pytest.mark.skipif(
        not hasattr(functional, "grouped_mm"), reason="this torch has no grouped_mm"
    )
    rows = [
        pytest.param(make, id=name, marks=needs if "grouped_mm" in name else ())
        for name, make in banks.items()
    ]
    return pytest.mark.parametrize("make", rows)


def drawn(bank):
    """The bank with no zero left."""
    for parameter in bank.parameters():
        nn.init.normal_(parameter, std=0.5)
    return bank


def definition(bank, rows, expert):
    if isinstance(bank, LowRankExperts):
        return rows @ bank.down_EDL[expert] @ bank.up_ELD[expert]
    hidden = rows @ bank.w1_EDH[expert] + bank.b1_EH[expert]
    slope = () if bank.slope_E1 is None else (bank.slope_E1[expert],)
    hidden = FUNCTIONS[bank.activation](hidden, *slope)
    return hidden @ bank.w2_EHD[expert] + bank.b2_ED[expert]


def test_every_activation_has_its_definition():
    assert {*ACTIVATIONS, "prelu"} == {*FUNCTIONS}


@every(ADAPTERS | FFNS)
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 1, 0], [0, 0, 0]])
def test_outputs_and_gradients_are_those_of_the_definition(make, counts):
    def by_hand(bank, tokens, counts_E):
        segments = enumerate(tokens.split(counts_E.tolist()))
        return torch.cat([definition(bank, rows, e) for e, rows in segments])

    results = []
    for function in (by_hand, lambda bank, *inputs: bank(*inputs)):
        torch.manual_seed(0)
        bank, tokens = drawn(make()), torch.randn(sum(counts), D, requires_grad=True)
        out = function(bank, tokens, torch.tensor(counts))
        out.square().sum().backward()
        results.append([out, tokens.grad, *(p.grad for p in bank.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    for grad in results[1][2:]:  # zeros, not None, where no token came
        assert not grad[torch.tensor(counts) == 0].any()


@pytest.mark.parametrize("num_experts", [1, 16])
def test_initial_scale_does_not_depend_on_the_number_of_experts(num_experts):
    torch.manual_seed(0)
    experts = FFNExperts(num_experts, 64, 256, activation="prelu")
    # xavier uniform: bound sqrt(6 / (fan_in + fan_out)) = sqrt(6 / 320) = 0.13693
    bound = math.sqrt(6 / 320)
    for weight in (experts.w1_EDH, experts.w2_EHD):
        assert 0.99 * bound < weight.abs().max() <= bound
        assert num_experts == 1 or not torch.equal(weight[0], weight[1])
    # biases of nn.Linear: 1 / sqrt(fan_in) = 1/8 and 1/16
    assert 0.9 / 8 < experts.b1_EH.abs().max() <= 1 / 8
    assert 0.7 / 16 < experts.b2_ED.abs().max() <= 1 / 16
    assert experts.slope_E1.tolist() == [[0.25]] * num_experts


def test_dropout_acts_in_training_only_and_at_both_places():
    torch.manual_seed(0)
    experts = FFNExperts(1, 64, 128, dropout=0.5)
    tokens, counts = torch.randn(100, 64), torch.tensor([100])
    dropped = experts(tokens, counts)
    # the last dropout zeroes half of the outputs
    assert abs((dropped == 0).float().mean().item() - 0.5) < 0.05
    kept = dropped != 0
    experts.eval()
    clean = experts(tokens, counts)
    assert torch.equal(clean, experts(tokens, counts))
    # were it the only one, the rest would be exactly twice the clean output
    assert not torch.allclose(dropped[kept], 2 * clean[kept])


def test_released_initialization_has_small_weights_and_no_biases():
    torch.manual_seed(0)
    experts = FFNExperts(4, 32, 64, init_std=0.005)
    for weight in (experts.w1_EDH, experts.w2_EHD):
        # 8192 weights: the standard error of their deviation is 0.005 / 128 = 0.8 %
        assert weight.std().item() == pytest.approx(0.005, rel=0.04)
    assert not experts.b1_EH.any()
    assert not experts.b2_ED.any()


def test_without_output_bias_the_second_bias_is_fixed_and_in_the_checkpoint():
    experts = FFNExperts(2, 4, 8, output_bias=False)
    names = [name for name, _ in experts.named_parameters()]
    assert names == ["w1_EDH", "b1_EH", "w2_EHD"]
    assert torch.equal(experts.state_dict()["b2_ED"], torch.zeros(2, 4))
    # relu(b1) = 0 for negative b1: only the second bias is left
    nn.init.constant_(experts.b1_EH, -1.0)
    out = experts(torch.zeros(3, 4), torch.tensor([1, 2]))
    assert torch.equal(out, torch.zeros(3, 4))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in experts.parameters())


@pytest.mark.parametrize("activation", ["relu", "prelu"])
def test_one_expert_for_all_tokens_is_the_bank_with_all_rows_its_own(activation):
    experts = FFNExperts(3, 6, 10, activation=activation)
    tokens_BND = torch.randn(2, 4, 6)
    out_BND = experts.forward_expert(tokens_BND, expert=1)
    expected_RD = experts(tokens_BND.flatten(0, 1), torch.tensor([0, 8, 0]))
    torch.testing.assert_close(out_BND.flatten(0, 1), expected_RD)
    out_BND.sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad[1].any()
        assert not parameter.grad[[0, 2]].any()


@every(ADAPTERS)
def test_adapters_start_at_zero_and_what_is_zero_learns(make):
    torch.manual_seed(0)
    bank = drawn(make())
    bank.reset_parameters()
    tokens = torch.randn(6, D)
    out = bank(tokens, torch.tensor([1, 2, 3]))
    assert torch.equal(out, torch.zeros(6, D))
    (out - 1.0).square().sum().backward()
    for name in bank.output_names:
        assert (getattr(bank, name).grad != 0).flatten(1).any(1).all(), name
    zero = {name for name, parameter in bank.named_parameters() if not parameter.any()}
    assert {*bank.output_names} == zero


@pytest.mark.parametrize(("width", "rank"), [(8, 1), (64, 4), (65, 5), (256, 16)])
def test_the_default_rank_follows_the_width(width, rank):
    assert LowRankExperts(E, width).up_ELD.shape == (E, rank, width)


def test_low_rank_experts_start_different_within_the_bound_of_lora():
    torch.manual_seed(0)
    down_EDL = LowRankExperts(16, 64, 16).down_EDL
    assert 0.99 / 8 < down_EDL.abs().max() <= 1 / 8  # 1 / sqrt(64)
    assert not torch.equal(down_EDL[0], down_EDL[1])
