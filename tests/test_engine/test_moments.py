"""Moments of a dense FFN for its experts, by values that are computed by hand."""

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN
from torch import nn

from damex.engine.optimizer_state import moment_starts
from damex.models.blocks import MoEFFN
from damex.models.context import RoutingContext
from damex.models.starts import DensePhase, SplitStart
from damex.moe import (
    FFNExperts,
    LinearRouter,
    LowRankExperts,
    MoELayer,
    SharedExpert,
    TopKGate,
)
from damex.papers.patch_convs import MoEPatchConv
from damex.papers.patches import PatchConvExperts

# An FFN with D = 2 and H = 3 (one hidden unit less than 2 parts of 2 have).
DENSE = nn.ModuleDict(dict(ffn=FFN(embed_dims=2, feedforward_channels=3)))
W1_HD = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
B1_H = torch.tensor([7.0, 8.0, 9.0])
W2_DH = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
B2_D = torch.tensor([10.0, 20.0])
MOMENTS = {
    "ffn.layers.0.0.weight": W1_HD,
    "ffn.layers.0.0.bias": B1_H,
    "ffn.layers.1.weight": W2_DH,
    "ffn.layers.1.bias": B2_D,
}


def make_model(*, num_experts=2, hidden_dims=3, experts=None, shared=None, **kwargs):
    layer = MoELayer(
        router=LinearRouter(2, num_experts),
        gate=TopKGate(k=1),
        experts=experts or FFNExperts(num_experts, 2, hidden_dims),
        shared_expert=shared,
    )
    block = MoEFFN(layer, name="decoder.0", context=RoutingContext(), **kwargs)
    return nn.ModuleDict(dict(ffn=block))


def convert(model, moments=MOMENTS, *, state=None, is_second=False):
    state = DENSE.state_dict() if state is None else state
    kind = "second" if is_second else "first"
    return {
        name: start.convert(moments[start.source], model.get_parameter(name), kind)
        for name, start in moment_starts(model, state).items()
        if start.source in moments
    }


@pytest.mark.parametrize(("is_second", "filled"), [(False, 0), (True, 1)])
def test_parts_have_those_of_their_hidden_units(is_second, filled):
    """Units 0 and 1 are one part, unit 2 and one that fills it up the other."""
    model = make_model(
        num_experts=4, hidden_dims=2, split=SplitStart(parts=2, hidden_dims=3)
    )
    found = convert(model, is_second=is_second)
    w1 = found["ffn.moe.experts.w1_EDH"].tolist()
    assert w1 == [[[1, 3], [2, 4]], [[5, 5 * filled], [6, 6 * filled]]] * 2
    b1 = found["ffn.moe.experts.b1_EH"].tolist()
    assert b1 == [[7, 8], [9, 9 * filled]] * 2
    w2 = found["ffn.moe.experts.w2_EHD"].tolist()
    assert w2 == [[[1, 4], [2, 5]], [[3, 6], [3 * filled, 6 * filled]]] * 2
    # Each part of the bias sees the gradient of the whole.
    assert found["ffn.moe.experts.b2_ED"].tolist() == [[10, 20]] * 4


def test_muted_experts_have_no_first_moment_where_they_are_zero():
    model = make_model(shared=SharedExpert(2, 3))
    first, second = convert(model), convert(model, is_second=True)
    for found in (first, second):
        shared = found["ffn.moe.shared_expert.expert.w2_EHD"]
        assert shared.tolist() == [[[1, 4], [2, 5], [3, 6]]]
        assert found["ffn.moe.experts.b1_EH"].tolist() == [[7, 8, 9]] * 2
    for name, moment in [("w2_EHD", W2_DH.t()), ("b2_ED", B2_D)]:
        assert not first[f"ffn.moe.experts.{name}"].any()
        assert torch.equal(second[f"ffn.moe.experts.{name}"], torch.stack([moment] * 2))


def test_a_shared_part_has_its_own_hidden_units():
    """Unit 0 is shared, and 1 and 2 are two parts of which there are two copies."""
    model = make_model(
        num_experts=4,
        hidden_dims=1,
        shared=SharedExpert(2, 1),
        split=SplitStart(parts=2, hidden_dims=3),
    )
    first, second = convert(model), convert(model, is_second=True)
    shared, routed = "ffn.moe.shared_expert.expert.", "ffn.moe.experts."
    for found in (first, second):
        assert found[shared + "w1_EDH"].tolist() == [[[1], [2]]]
        assert found[shared + "w2_EHD"].tolist() == [[[1, 4]]]
        assert found[shared + "b2_ED"].tolist() == [[10, 20]]
        assert found[routed + "w1_EDH"].tolist() == [[[3], [4]], [[5], [6]]] * 2
        assert found[routed + "b1_EH"].tolist() == [[8], [9]] * 2
        assert found[routed + "w2_EHD"].tolist() == [[[2, 5]], [[3, 6]]] * 2
    assert first[routed + "b2_ED"].tolist() == [[0, 0]] * 4
    assert second[routed + "b2_ED"].tolist() == [[10, 20]] * 4


def test_adapters_start_without_moments():
    experts, shared = LowRankExperts(2, 2, rank=1), SharedExpert(2, 3)
    found = convert(make_model(experts=experts, shared=shared))
    names = ("w1_EDH", "b1_EH", "w2_EHD", "b2_ED")
    assert set(found) == {f"ffn.moe.shared_expert.expert.{name}" for name in names}


def test_a_slope_and_a_bias_that_does_not_learn():
    model = make_model(
        experts=FFNExperts(2, 2, 3, activation="prelu", output_bias=False)
    )
    dense = FFN(2, feedforward_channels=3, act_cfg=dict(type="PReLU"))
    moments = {**MOMENTS, "ffn.layers.0.1.weight": torch.tensor([0.5])}
    state = nn.ModuleDict(dict(ffn=dense)).state_dict()
    found = convert(model, moments, state=state)
    assert found["ffn.moe.experts.slope_E1"].tolist() == [[0.5], [0.5]]
    assert "ffn.moe.experts.b2_ED" not in found


def test_an_ffn_of_another_width_gives_nothing():
    """Not even the bias that would fit: its weights are not loaded."""
    assert convert(make_model(hidden_dims=4)) == {}


@pytest.mark.parametrize("is_dense", [True, False])
def test_of_a_dense_phase_there_is_one_expert_to_copy(is_dense):
    model = make_model(dense_phase=DensePhase())
    if not is_dense:
        model["ffn"].dense_phase.close()
    moments = {"ffn.moe.experts.b2_ED": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    found = convert(make_model(), moments, state=model.state_dict())
    expected = [[1, 2], [1, 2]] if is_dense else [[1, 2], [3, 4]]
    assert found["ffn.moe.experts.b2_ED"].tolist() == expected
    again = make_model(dense_phase=DensePhase())  # uses one of them, too
    found = convert(again, moments, state=model.state_dict())
    assert found["ffn.moe.experts.b2_ED"].tolist() == [[1, 2], [3, 4]]


def test_experts_of_a_convolution_have_their_slice():
    experts = PatchConvExperts(2, 2, 4, kernel_size=3, patch_size=1)
    layer = MoELayer(
        router=LinearRouter(experts.embed_dims, 2), gate=TopKGate(k=1), experts=experts
    )
    block = MoEPatchConv(
        layer, name="backbone.3", context=RoutingContext(), with_cp=False
    )
    model = nn.ModuleDict(dict(conv=block))
    kernel = torch.arange(72.0).view(4, 2, 3, 3)
    state = {"conv.weight": kernel}
    (found,) = convert(model, state, state=state).values()
    assert torch.equal(found.flatten(0, 1), kernel)


def test_the_norm_that_moves_takes_its_moments_along(build):
    dense, pre = (
        build(moe=None),
        build(moe=dict(layers=dict(decoder=[0]), block=dict(norm="pre"))),
    )
    origins = moment_starts(pre, dense.state_dict())
    path = "decoder.layers.0"
    assert origins[f"{path}.ffn.norm.weight"].source == f"{path}.norms.2.weight"
    assert origins[f"{path}.norms.1.weight"].source == f"{path}.norms.1.weight"
    again = moment_starts(pre, pre.state_dict())
    assert again[f"{path}.ffn.norm.weight"].source == f"{path}.ffn.norm.weight"
