"""Tests of damex.moe.adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from damex.moe import (
    AffineExperts,
    DenseSoftmaxGate,
    ExpertChoiceGate,
    LinearRouter,
    LowRankExperts,
    MoELayer,
    SharedExpert,
    TopKGate,
    load_dense_split,
)

D, L, E = 8, 4, 3
HAS_GROUPED_MM = hasattr(functional, "grouped_mm")
BANKS = {
    "low rank, split": lambda e=E: LowRankExperts(e, D, L, backend="split"),
    "low rank, grouped_mm": lambda e=E: LowRankExperts(e, D, L, backend="grouped_mm"),
    "affine": lambda e=E: AffineExperts(e, D),
}
every_bank = pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            make,
            id=name,
            marks=pytest.mark.skipif(
                "grouped_mm" in name and not HAS_GROUPED_MM,
                reason="this torch has no grouped_mm",
            ),
        )
        for name, make in BANKS.items()
    ],
)


def drawn(bank):
    """The bank with no zero left."""
    for parameter in bank.parameters():
        nn.init.normal_(parameter)
    return bank


def definition(bank, rows, expert):
    if isinstance(bank, LowRankExperts):
        return rows @ bank.down_EDL[expert] @ bank.up_ELD[expert]
    return bank.gamma_ED[expert] * rows + bank.beta_ED[expert]


def test_low_rank_by_hand():
    bank = LowRankExperts(2, 2, 1)
    with torch.no_grad():
        bank.down_EDL.copy_(torch.tensor([[[1.0], [2.0]], [[1.0], [-1.0]]]))
        bank.up_ELD.copy_(torch.tensor([[[3.0, 4.0]], [[5.0, 0.0]]]))
    tokens = torch.tensor([[1.0, 1.0], [2.0, 0.0], [7.0, 5.0]])
    # (1 + 2) [3, 4], 2 [3, 4] and (7 - 5) [5, 0]
    out = bank(tokens, torch.tensor([2, 1]))
    assert out.tolist() == [[9.0, 12.0], [6.0, 8.0], [10.0, 0.0]]


def test_affine_by_hand():
    bank = AffineExperts(2, 2)
    with torch.no_grad():
        bank.gamma_ED.copy_(torch.tensor([[2.0, 0.0], [1.0, -1.0]]))
        bank.beta_ED.copy_(torch.tensor([[0.0, 3.0], [10.0, 20.0]]))
    tokens = torch.tensor([[1.0, 1.0], [2.0, 5.0], [4.0, 6.0]])
    out = bank(tokens, torch.tensor([1, 2]))
    assert out.tolist() == [[2.0, 3.0], [12.0, 15.0], [14.0, 14.0]]


@every_bank
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
        assert torch.equal((grad != 0).flatten(1).any(1), torch.tensor(counts) > 0)


@every_bank
def test_permuting_experts_and_their_rows_permutes_outputs(make):
    torch.manual_seed(0)
    bank, tokens = drawn(make()), torch.randn(6, D)
    first, second, third = bank(tokens, torch.tensor([1, 2, 3])).split([1, 2, 3])
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.copy_(parameter[[2, 0, 1]].clone())
    a, b, c = tokens.split([1, 2, 3])
    out = bank(torch.cat([c, a, b]), torch.tensor([3, 1, 2]))
    torch.testing.assert_close(out, torch.cat([third, first, second]))


@every_bank
def test_starts_at_zero_and_what_is_zero_learns(make):
    torch.manual_seed(0)
    bank = drawn(make())
    bank.reset_parameters()
    tokens = torch.randn(6, D)
    out = bank(tokens, torch.tensor([1, 2, 3]))
    assert torch.equal(out, torch.zeros(6, D))
    (out - 1.0).square().sum().backward()
    for name in bank.output_names:
        assert not getattr(bank, name).any()
        assert (getattr(bank, name).grad != 0).flatten(1).any(1).all(), name
    assert {*bank.output_names} == {
        name for name, parameter in bank.named_parameters() if not parameter.any()
    }


@pytest.mark.parametrize(("width", "rank"), [(8, 1), (64, 4), (65, 5), (256, 16)])
def test_the_rank_follows_the_width_where_none_is_given(width, rank):
    assert LowRankExperts(E, width).up_ELD.shape == (E, rank, width)


def test_low_rank_experts_start_with_maps_of_their_own_within_the_bound_of_lora():
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


@every_bank
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
def test_a_layer_starts_as_its_shared_ffn_whatever_the_gate(make, gate):
    layer = make_layer(make, gate=gate)
    tokens = torch.randn(2, 5, D)
    alone = layer.shared_expert(tokens.flatten(0, 1)).view(2, 5, D)
    assert torch.equal(layer(tokens)[0], alone)
    nn.init.normal_(layer.experts.get_parameter(layer.experts.output_names[0]))
    assert not torch.equal(layer(tokens)[0], alone)
    layer.reset_parameters()
    alone = layer.shared_expert(tokens.flatten(0, 1)).view(2, 5, D)
    assert torch.equal(layer(tokens)[0], alone)


@every_bank
def test_one_expert_is_a_dense_ffn_with_a_correction(make):
    layer = make_layer(make, num_experts=1)
    drawn(layer.experts)
    first, second = nn.Linear(D, 12), nn.Linear(12, D)
    dense = (first.weight, first.bias, second.weight, second.bias)
    load_dense_split(layer.shared_expert.expert, *dense, parts=1)
    tokens = torch.randn(2, 5, D)
    expected = second(first(tokens).relu()) + definition(layer.experts, tokens, 0)
    torch.testing.assert_close(layer(tokens)[0], expected)


@every_bank
def test_training_goes_on_from_a_checkpoint_as_if_not_cut(make):
    def train(layer, optimizer, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randn(2, 5, D, generator=generator)
            (layer(tokens)[0] - 1.0).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, cut, resumed = (make_layer(make) for _ in range(3))
    optimizers = [torch.optim.AdamW(x.parameters()) for x in (whole, cut, resumed)]
    train(whole, optimizers[0], [1, 2, 3, 4])
    train(cut, optimizers[1], [1, 2])
    resumed.load_state_dict(cut.state_dict())
    optimizers[2].load_state_dict(optimizers[1].state_dict())
    train(resumed, optimizers[2], [3, 4])
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    assert all(tensor.any() for tensor in whole.experts.state_dict().values())


def test_a_rank_too_narrow_for_the_fast_kernel_runs_without_it():
    bank = drawn(LowRankExperts(E, D, 3))  # 12 bytes
    tokens = torch.randn(2, D)
    out = bank(tokens, torch.tensor([0, 2, 0]))
    torch.testing.assert_close(out, definition(bank, tokens, 1))


def test_errors():
    with pytest.raises(ValueError, match="num_experts must be at least 1, got 0"):
        LowRankExperts(0, D, L)
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        LowRankExperts(E, D, 0)
    with pytest.raises(ValueError, match=r"rank must be at most embed_dims=8, .*got 9"):
        LowRankExperts(E, D, 9)
    with pytest.raises(ValueError, match="unknown backend"):
        LowRankExperts(E, D, L, backend="cutlass")
    with pytest.raises(ValueError, match="embed_dims must be at least 1, got 0"):
        AffineExperts(E, 0)
