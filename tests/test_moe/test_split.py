"""Tests of damex.moe.split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from damex.moe import (
    FFNExperts,
    LinearRouter,
    MoELayer,
    SharedExpert,
    TopKGate,
    load_dense_split,
    load_shared_split,
    repeat_router_rows,
    shared_hidden_dims,
    split_hidden_dims,
)

D = 8
DENSE = (
    torch.tensor([[1.0], [2.0], [3.0]]),
    torch.tensor([4.0, 5.0, 6.0]),
    torch.tensor([[7.0, 8.0, 9.0]]),
    torch.tensor([10.0]),
)


def make(hidden_dims, *, parts, copies, activation="relu", init_std=1.0):
    """A dense FFN and the mixture cut from it."""
    torch.manual_seed(0)
    modules = {"relu": nn.ReLU, "gelu": nn.GELU, "prelu": lambda: nn.PReLU(init=0.7)}
    ffn = nn.Sequential(
        nn.Linear(D, hidden_dims), modules[activation](), nn.Linear(hidden_dims, D)
    )
    num_experts = parts * copies
    width = split_hidden_dims(hidden_dims, parts=parts)
    layer = MoELayer(
        router=LinearRouter(D, num_experts, bias=True, init_std=init_std),
        gate=TopKGate(parts, renormalize=True, weight_scale=parts),
        experts=FFNExperts(num_experts, D, width, activation=activation),
    )
    first, between, second = ffn
    dense = (first.weight, first.bias, second.weight, second.bias)
    slope = between.weight if activation == "prelu" else None
    load_dense_split(layer.experts, *dense, parts=parts, slope_1=slope)
    nn.init.normal_(layer.router.bias_E)
    repeat_router_rows(layer.router, parts=parts)
    return ffn, layer


@pytest.mark.parametrize("activation", ["relu", "prelu"])
@pytest.mark.parametrize("hidden_dims", [12, 13, 17])
@pytest.mark.parametrize(("parts", "copies"), [(1, 3), (2, 4), (3, 2), (4, 16)])
def test_the_mixture_equals_the_dense_ffn(activation, hidden_dims, parts, copies):
    ffn, layer = make(hidden_dims, parts=parts, copies=copies, activation=activation)
    tokens = torch.randn(2, 50, D)
    out, record = layer(tokens)
    assert (out - ffn(tokens)).abs().max() <= 1e-5
    # the tokens are spread over copies, and take all parts of one copy
    by_copy = record.assignment.counts_E.view(copies, parts)
    assert (by_copy == by_copy[:, :1]).all()
    assert (by_copy[:, 0] > 0).sum() >= 2


def test_ties_of_all_copies_take_one_whole_copy():
    ffn, layer = make(12, parts=3, copies=4)
    nn.init.zeros_(layer.router.weight_ED)
    nn.init.zeros_(layer.router.bias_E)
    tokens = torch.randn(2, 5, D)
    out, record = layer(tokens)
    assert record.assignment.counts_E.tolist() == [10] * 3 + [0] * 9
    assert (out - ffn(tokens)).abs().max() <= 1e-5


def test_layout_by_hand():
    # H = 3 in two parts: units 0, 1 and unit 2; b2 is halved; experts 0, 2 are part 0
    experts = FFNExperts(4, 1, 2)
    first = experts.w1_EDH.detach().clone()
    load_dense_split(experts, *DENSE, parts=2)
    assert experts.b2_ED.tolist() == [[5.0]] * 4
    for copy in (0, 2):
        assert experts.w1_EDH[copy].tolist() == [[1.0, 2.0]]
        assert experts.b1_EH[copy].tolist() == [4.0, 5.0]
        assert experts.w2_EHD[copy].tolist() == [[7.0], [8.0]]
        assert experts.w1_EDH[copy + 1, 0, 0] == 3.0
        assert experts.b1_EH[copy + 1, 0] == 6.0
        # the unit over: zero behind, as it was drawn before
        assert experts.w2_EHD[copy + 1].tolist() == [[9.0], [0.0]]
        assert experts.w1_EDH[copy + 1, 0, 1] == first[copy + 1, 0, 1] != 0


def test_layout_with_a_shared_expert_by_hand():
    # H = 3: units 0 and 1 are shared, with the bias; unit 2 is in every copy
    shared, experts = SharedExpert(1, 2), FFNExperts(2, 1, 1)
    load_shared_split(shared, experts, *DENSE, parts=1)
    # 14 units in four parts: 4, 4, 3, 3
    counts = [shared_hidden_dims(14, parts=4, shared=shared) for shared in range(4)]
    assert counts == [0, 4, 8, 11]
    assert shared.expert.w1_EDH.tolist() == [[[1.0, 2.0]]]
    assert shared.expert.b1_EH.tolist() == [[4.0, 5.0]]
    assert shared.expert.w2_EHD.tolist() == [[[7.0], [8.0]]]
    assert shared.expert.b2_ED.tolist() == [[10.0]]
    assert experts.w1_EDH.tolist() == [[[3.0]]] * 2
    assert experts.b1_EH.tolist() == [[6.0]] * 2
    assert experts.w2_EHD.tolist() == [[[9.0]]] * 2
    assert experts.b2_ED.tolist() == [[0.0]] * 2
    # x = 1: 7 relu(1 + 4) + 8 relu(2 + 5) + 9 relu(3 + 6) + 10 = 182
    tokens = torch.ones(2, 1)
    out = shared(tokens) + experts(tokens, torch.tensor([1, 1]))
    assert out.tolist() == [[182.0]] * 2


def test_router_and_spare_units_can_learn():
    _, layer = make(13, parts=2, copies=2, activation="gelu")
    layer(torch.randn(2, 50, D))[0].square().sum().backward()
    assert (layer.router.weight_ED.grad != 0).any()
    assert (layer.experts.w2_EHD.grad[1, -1] != 0).any()
