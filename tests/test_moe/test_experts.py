"""Experts: FFNs, and adapters added to a shared FFN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from damex.moe import (
    AffineExperts,
    DenseSoftmaxGate,
    ExpertChoiceGate,
    FFNExperts,
    LinearRouter,
    LowRankExperts,
    MoELayer,
    SharedExpert,
    TopKGate,
    load_dense_split,
)
from damex.moe.experts import ACTIVATIONS

D, L, E = 8, 4, 3
ADAPTERS = {
    "low rank, split": lambda e=E: LowRankExperts(e, D, L, backend="split"),
    "low rank, grouped_mm": lambda e=E: LowRankExperts(e, D, L, backend="grouped_mm"),
    "affine": lambda e=E: AffineExperts(e, D),
}
FFNS = {
    f"{activation}, {backend}": lambda a=activation, b=backend: FFNExperts(
        E, D, 12, activation=a, backend=b
    )
    for activation in ("gelu", "prelu")
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
    if isinstance(bank, AffineExperts):
        return bank.gamma_ED[expert] * rows + bank.beta_ED[expert]
    hidden = rows @ bank.w1_EDH[expert] + bank.b1_EH[expert]
    if bank.slope_E1 is None:
        hidden = functional.gelu(hidden)
    else:
        hidden = functional.prelu(hidden, bank.slope_E1[expert])
    return hidden @ bank.w2_EHD[expert] + bank.b2_ED[expert]


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
    torch.testing.assert_close(*results)
    for grad in results[1][2:]:  # zeros, not None, where no token came
        assert not grad[torch.tensor(counts) == 0].any()


def dense_ffn(activation=nn.ReLU):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), activation(), nn.Linear(10, 6))


def load(experts, ffn):
    first, middle, second = ffn
    dense = (first.weight, first.bias, second.weight, second.bias)
    slope = middle.weight if isinstance(middle, nn.PReLU) else None
    load_dense_split(experts, *dense, parts=1, slope_1=slope)


class Cubic(nn.Module):
    def forward(self, x):
        return x**3


MODULES = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "celu": nn.CELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "cubic": Cubic,
    "identity": nn.Identity,
    "prelu": lambda: nn.PReLU(init=0.1),
}


@pytest.mark.parametrize("name", [*ACTIVATIONS, "prelu"])
def test_loaded_experts_equal_the_dense_ffn(name):
    ffn = dense_ffn(activation=MODULES[name])
    experts = FFNExperts(3, 6, 10, activation=name)
    load(experts, ffn)
    tokens = torch.randn(7, 6)
    out = experts(tokens, torch.tensor([2, 0, 5]))
    torch.testing.assert_close(out, ffn(tokens))


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


def test_a_layer_adds_a_shared_expert_with_weight_one_and_routes_as_before():
    torch.manual_seed(0)
    parts = dict(
        router=LinearRouter(4, 3), gate=TopKGate(1), experts=FFNExperts(3, 4, 6)
    )
    shared = SharedExpert(4, 8)
    tokens = torch.randn(2, 5, 4)
    plain, record = MoELayer(**parts)(tokens)
    both, shared_record = MoELayer(**parts, shared_expert=shared)(tokens)
    expected = plain + shared(tokens.flatten(0, 1)).view(2, 5, 4)
    torch.testing.assert_close(both, expected)
    assert torch.equal(record.assignment.counts_E, shared_record.assignment.counts_E)


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


GATES = {
    "top1": lambda: TopKGate(1),
    "top2 of weight 1": lambda: TopKGate(2, renormalize=True, weight_scale=2.0),
    "dense": DenseSoftmaxGate,
    "expert choice": lambda: ExpertChoiceGate(num_tokens=3),
}


def make_layer(make, *, gate=GATES["top1"], num_experts=E):
    torch.manual_seed(0)
    return MoELayer(
        router=LinearRouter(D, num_experts, init_std=1.0),
        gate=gate(),
        experts=make(num_experts),
        shared_expert=SharedExpert(D, 12),
    )


@every(ADAPTERS)
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
def test_a_layer_of_adapters_starts_as_its_shared_ffn_with_any_gate(make, gate):
    layer = make_layer(make, gate=gate)
    tokens = torch.randn(2, 5, D)
    alone = layer.shared_expert(tokens.flatten(0, 1)).view(2, 5, D)
    assert torch.equal(layer(tokens)[0], alone)
    nn.init.normal_(layer.experts.get_parameter(layer.experts.output_names[0]))
    assert not torch.equal(layer(tokens)[0], alone)


@every(ADAPTERS)
def test_one_adapter_is_a_dense_ffn_with_a_correction(make):
    layer = make_layer(make, num_experts=1)
    drawn(layer.experts)
    first, second = nn.Linear(D, 12), nn.Linear(12, D)
    dense = (first.weight, first.bias, second.weight, second.bias)
    load_dense_split(layer.shared_expert.expert, *dense, parts=1)
    tokens = torch.randn(2, 5, D)
    expected = second(first(tokens).relu()) + definition(layer.experts, tokens, 0)
    torch.testing.assert_close(layer(tokens)[0], expected)
