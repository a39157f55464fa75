"""Tests of damex.moe.experts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from damex.moe import (
    FFNExperts,
    LinearRouter,
    MoELayer,
    SharedExpert,
    TopKGate,
    load_dense_split,
)
from damex.moe.experts import ACTIVATIONS


def dense_ffn(embed_dims=6, hidden_dims=10, activation=nn.ReLU):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(embed_dims, hidden_dims),
        activation(),
        nn.Linear(hidden_dims, embed_dims),
    )


def load(experts, ffn, **kwargs):
    first, middle, second = ffn
    if isinstance(middle, nn.PReLU):
        kwargs["slope_1"] = middle.weight
    dense = (first.weight, first.bias, second.weight, second.bias)
    load_dense_split(experts, *dense, parts=1, **kwargs)


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


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_loaded_experts_equal_the_dense_ffn(name, module):
    ffn = dense_ffn(activation=module)
    experts = FFNExperts(3, 6, 10, activation=name)
    load(experts, ffn)
    tokens = torch.randn(7, 6)
    out = experts(tokens, torch.tensor([2, 0, 5]))
    torch.testing.assert_close(out, ffn(tokens))


def test_every_activation_is_tested_above():
    assert set(MODULES) == {*ACTIVATIONS, "prelu"}


BACKENDS = [
    "split",
    pytest.param(
        "grouped_mm",
        marks=pytest.mark.skipif(
            not hasattr(functional, "grouped_mm"), reason="this torch has no grouped_mm"
        ),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 1, 0], [0, 0, 0]])
@pytest.mark.parametrize("activation", ["gelu", "prelu"])
def test_backends_agree_with_the_definition(backend, counts, activation):
    def by_hand(experts, tokens, counts_E):
        outs = []
        for e, rows in enumerate(tokens.split(counts_E.tolist())):
            hidden = rows @ experts.w1_EDH[e] + experts.b1_EH[e]
            if experts.slope_E1 is None:
                hidden = functional.gelu(hidden)
            else:
                hidden = functional.prelu(hidden, experts.slope_E1[e])
            outs.append(hidden @ experts.w2_EHD[e] + experts.b2_ED[e])
        return torch.cat(outs)

    results = []
    for function in (by_hand, FFNExperts.__call__):
        torch.manual_seed(0)
        experts = FFNExperts(3, 8, 12, activation=activation, backend=backend)
        if experts.slope_E1 is not None:
            experts.slope_E1.data += torch.arange(3.0).view(3, 1)
        tokens = torch.randn(sum(counts), 8, requires_grad=True)
        out = function(experts, tokens, torch.tensor(counts))
        out.square().sum().backward()
        results.append([out, tokens.grad, *(p.grad for p in experts.parameters())])
    torch.testing.assert_close(*results)


def test_every_prelu_expert_learns_a_slope_of_its_own():
    experts = FFNExperts(3, 1, 1, activation="prelu")
    assert experts.slope_E1.tolist() == [[0.25]] * 3
    with torch.no_grad():
        for weight, bias in (
            (experts.w1_EDH, experts.b1_EH),
            (experts.w2_EHD, experts.b2_ED),
        ):
            weight.fill_(1.0)
            bias.zero_()
        experts.slope_E1.copy_(torch.tensor([[0.5], [3.0], [7.0]]))
    tokens = torch.tensor([[2.0], [-2.0], [-3.0], [5.0]])
    out = experts(tokens, torch.tensor([2, 2, 0]))
    assert out.tolist() == [[2.0], [-1.0], [-9.0], [5.0]]
    out.sum().backward()
    # the slope's gradient is the sum of the negative hidden values
    assert experts.slope_E1.grad.tolist() == [[-2.0], [-3.0], [0.0]]


def test_load_dense_copies_and_does_not_alias():
    ffn = dense_ffn()
    experts = FFNExperts(2, 6, 10)
    load(experts, ffn)
    with torch.no_grad():
        experts.w1_EDH[0].zero_()
    assert ffn[0].weight.abs().sum() > 0
    assert torch.equal(experts.w1_EDH[1], ffn[0].weight.T)


@pytest.mark.parametrize("num_experts", [1, 16])
def test_initial_scale_does_not_depend_on_the_number_of_experts(num_experts):
    torch.manual_seed(0)
    experts = FFNExperts(num_experts, 64, 256)
    # xavier uniform: bound sqrt(6 / (fan_in + fan_out)) = sqrt(6 / 320) = 0.13693
    bound = math.sqrt(6 / 320)
    for weight in (experts.w1_EDH, experts.w2_EHD):
        assert 0.99 * bound < weight.abs().max() <= bound
    # biases of nn.Linear: 1 / sqrt(fan_in) = 1/8 and 1/16
    assert 0.9 / 8 < experts.b1_EH.abs().max() <= 1 / 8
    assert 0.7 / 16 < experts.b2_ED.abs().max() <= 1 / 16


def test_experts_start_different_from_each_other():
    experts = FFNExperts(2, 8, 8)
    assert not torch.equal(experts.w1_EDH[0], experts.w1_EDH[1])


def test_each_run_of_rows_sees_its_own_expert_only():
    experts = FFNExperts(3, 6, 10)
    tokens, counts = torch.randn(6, 6), torch.tensor([1, 2, 3])
    before = experts(tokens, counts)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter[1] += 1.0
    changed = (experts(tokens, counts) != before).any(dim=1)
    assert changed.tolist() == [False, True, True, False, False, False]


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


def test_errors():
    with pytest.raises(ValueError, match="num_experts must be at least 1, got 0"):
        FFNExperts(0, 4, 8)
    with pytest.raises(ValueError, match=r"unknown activation 'swish'.*'silu'"):
        FFNExperts(2, 4, 8, activation="swish")
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1.0"):
        FFNExperts(2, 4, 8, dropout=1.0)
    with pytest.raises(ValueError, match="unknown backend"):
        FFNExperts(2, 4, 8, backend="cutlass")
    with pytest.raises(ValueError, match=r"'relu' have no slope_1"):
        load(FFNExperts(2, 6, 10), dense_ffn(activation=nn.PReLU))
    with pytest.raises(ValueError, match=r"'prelu' need a slope_1"):
        load(FFNExperts(2, 6, 10, activation="prelu"), dense_ffn())
    with pytest.raises(ValueError, match="with D=6 and H=10, got D=6 and H=12"):
        load(FFNExperts(2, 6, 12), dense_ffn())


def test_released_initialisation_has_small_weights_and_no_biases():
    torch.manual_seed(0)
    experts = FFNExperts(4, 32, 64, init_std=0.005)
    for weight in (experts.w1_EDH, experts.w2_EHD):
        # 8192 weights: the standard error of their deviation is 0.005 / 128 = 0.8 %
        assert weight.std().item() == pytest.approx(0.005, rel=0.04)
    assert not experts.b1_EH.any()
    assert not experts.b2_ED.any()
    experts.reset_parameters()
    assert experts.w1_EDH.abs().max() < 0.05


def test_without_output_bias_the_second_bias_is_fixed_and_in_the_checkpoint():
    experts = FFNExperts(2, 4, 8, output_bias=False)
    assert {name for name, _ in experts.named_parameters()} == {
        "w1_EDH",
        "b1_EH",
        "w2_EHD",
    }
    assert torch.equal(experts.state_dict()["b2_ED"], torch.zeros(2, 4))
    # relu(b1) = 0 for negative b1: nothing but the second bias is left
    torch.nn.init.constant_(experts.b1_EH, -1.0)
    out = experts(torch.zeros(3, 4), torch.tensor([1, 2]))
    assert torch.equal(out, torch.zeros(3, 4))


@pytest.mark.parametrize("backend", ["split"])
def test_experts_without_output_bias_train(backend):
    experts = FFNExperts(3, 4, 8, output_bias=False, backend=backend)
    experts(torch.randn(5, 4), torch.tensor([2, 0, 3])).square().sum().backward()
    assert all(p.grad is not None for p in experts.parameters())


def test_a_spread_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match=r"init_std must be above 0, got -0\.1"):
        FFNExperts(2, 4, 8, init_std=-0.1)


def test_every_token_passes_the_shared_expert():
    shared = SharedExpert(4, 6, activation="gelu")
    first, second = nn.Linear(4, 6), nn.Linear(6, 4)
    dense = (first.weight, first.bias, second.weight, second.bias)
    load_dense_split(shared.expert, *dense, parts=1)
    tokens = torch.randn(5, 4)
    expected = second(nn.functional.gelu(first(tokens)))
    torch.testing.assert_close(shared(tokens), expected)


def test_a_layer_adds_it_with_weight_one_and_routes_as_before():
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


def test_reset_of_the_layer_reaches_it():
    layer = MoELayer(
        router=LinearRouter(4, 3),
        gate=TopKGate(1),
        experts=FFNExperts(3, 4, 6),
        shared_expert=SharedExpert(4, 6),
    )
    nn.init.constant_(layer.shared_expert.expert.w1_EDH, 7.0)
    layer.reset_parameters()
    assert (layer.shared_expert.expert.w1_EDH != 7.0).all()


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
