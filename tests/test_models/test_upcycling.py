import copy
from pathlib import Path

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN
from mmengine.config import Config

from damex.models.blocks import MoEFFN
from damex.models.context import RoutingContext
from damex.models.upcycling import upcycling_note
from damex.moe import (
    ExpertChoiceGate,
    FFNExperts,
    LinearRouter,
    MoELayer,
    SharedExpert,
    TopKGate,
)

CONFIGS = Path(__file__).parents[2] / "configs/_base_/moe"


def make_block(gate, *, shared_expert=None, num_experts=3):
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, num_experts),
        gate=gate,
        experts=FFNExperts(num_experts, 8, 16),
        shared_expert=shared_expert,
    )
    return MoEFFN(layer, name="decoder.0", context=RoutingContext())


@pytest.fixture
def block():
    return make_block(TopKGate(k=2, renormalize=True))


@pytest.fixture
def tokens_BND():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def test_every_expert_starts_as_the_ffn_of_a_dense_checkpoint(block, tokens_BND):
    """Weights of a token sum to one here, so that the block equals the FFN."""
    dense = FFN(embed_dims=8, feedforward_channels=16)
    router = block.moe.router.weight_ED.detach().clone()
    state = dense.state_dict()
    block.load_state_dict(state)
    assert set(state) == set(dense.state_dict())  # the caller's dict is its own
    assert torch.equal(block.moe.router.weight_ED, router)
    torch.testing.assert_close(block(tokens_BND), dense(tokens_BND))


def test_the_slope_of_a_prelu_is_taken_over_too(tokens_BND):
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, 2),
        gate=TopKGate(k=2, renormalize=True),
        experts=FFNExperts(2, 8, 16, activation="prelu"),
    )
    block = MoEFFN(layer, name="decoder.0", context=RoutingContext())
    dense = FFN(embed_dims=8, feedforward_channels=16, act_cfg=dict(type="PReLU"))
    torch.nn.init.constant_(dense.layers[0][1].weight, -1.5)
    block.load_state_dict(dense.state_dict())
    assert layer.experts.slope_E1.tolist() == [[-1.5], [-1.5]]
    torch.testing.assert_close(block(tokens_BND), dense(tokens_BND))


def test_a_copy_upcycles_itself_and_not_the_original(block, tokens_BND):
    dense = FFN(embed_dims=8, feedforward_channels=16)
    before = block(tokens_BND)
    other = copy.deepcopy(block)
    other.load_state_dict(dense.state_dict())
    torch.testing.assert_close(other(tokens_BND), dense(tokens_BND))
    assert torch.equal(block(tokens_BND), before)


def test_an_ffn_of_another_width_is_reported_by_the_loader(block):
    dense = FFN(embed_dims=8, feedforward_channels=32)
    with pytest.raises(RuntimeError, match="Missing key"):
        block.load_state_dict(dense.state_dict())


def test_a_shared_expert_becomes_the_ffn_and_the_others_add_nothing(tokens_BND):
    block = make_block(TopKGate(k=1), shared_expert=SharedExpert(8, 16))
    dense = FFN(embed_dims=8, feedforward_channels=16)
    block.load_state_dict(dense.state_dict())
    torch.testing.assert_close(block(tokens_BND), dense(tokens_BND))
    block(tokens_BND).sum().backward()
    assert block.moe.experts.w2_EHD.grad.abs().sum() > 0  # and they can learn


def test_the_shipped_pmoe_keeps_the_scale_of_a_dense_checkpoint(tokens_BND):
    """Each of 8 experts takes an eighth of the tokens with weights of mean 1."""
    gate = dict(Config.fromfile(CONFIGS / "pmoe.py").moe.gate)
    assert gate.pop("type") == "ExpertChoiceGate"
    block = make_block(ExpertChoiceGate(**{**gate, "share": 1.0}), num_experts=8)
    torch.nn.init.zeros_(block.moe.router.weight_ED)  # equal scores
    dense = FFN(embed_dims=8, feedforward_channels=16)
    block.load_state_dict(dense.state_dict())
    added = dense(tokens_BND) - tokens_BND
    torch.testing.assert_close(block(tokens_BND), tokens_BND + 8 * added)


@pytest.mark.parametrize(
    ("gate", "shared_expert", "is_said"),
    [
        (TopKGate(k=1), None, True),
        (TopKGate(k=1, renormalize=True), None, False),
        (TopKGate(k=1), SharedExpert(8, 16), False),
        (ExpertChoiceGate(share=0.5, mean_one=True), None, False),
    ],
)
def test_what_a_dense_checkpoint_loses_is_said(gate, shared_expert, is_said):
    model = torch.nn.ModuleDict(dict(ffn=make_block(gate, shared_expert=shared_expert)))
    dense = torch.nn.ModuleDict(dict(ffn=FFN(embed_dims=8, feedforward_channels=16)))
    note = upcycling_note(model, dense.state_dict())
    assert (note is not None) == is_said
    if note is not None:
        assert "1 layers become experts with gate weights near 1/3" in note
        assert "moe.gate.renormalize=True" in note
    assert upcycling_note(model, model.state_dict()) is None


@pytest.mark.parametrize(("trained", "is_said"), [("GELU", False), ("ReLU", True)])
def test_another_activation_is_said(trained, is_said):
    dense = FFN(embed_dims=8, feedforward_channels=16, act_cfg=dict(type=trained))
    layer = MoELayer(
        router=LinearRouter(8, 2),
        gate=TopKGate(k=1, renormalize=True),
        experts=FFNExperts(2, 8, 16, activation="gelu"),
    )
    block = MoEFFN(layer, name="decoder.0", context=RoutingContext(), dense=dense)
    state = torch.nn.ModuleDict(dict(ffn=dense)).state_dict()
    note = upcycling_note(torch.nn.ModuleDict(dict(ffn=block)), state)
    assert (note is not None) == is_said
    if note is not None:
        assert "1 layers were trained with relu and become experts with gelu" in note
        assert "moe.experts.activation='relu'" in note
