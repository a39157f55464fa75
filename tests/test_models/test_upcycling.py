import copy
from pathlib import Path

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN
from mmengine.config import Config

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.context import RoutingContext
from damex.models.insertion import moe_blocks
from damex.models.upcycling import upcycling_note
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
)

CONFIGS = Path(__file__).parents[2] / "configs/_base_/moe"


def make_block(gate, *, experts=None, shared_expert=None, num_experts=3):
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, num_experts),
        gate=gate,
        experts=experts or FFNExperts(num_experts, 8, 16),
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


PRIVATE = {
    "low rank": lambda: LowRankExperts(3, 8, 2),
    "affine": lambda: AffineExperts(3, 8),
    "narrower FFNs": lambda: FFNExperts(3, 8, 5),
    "FFNs with another activation": lambda: FFNExperts(3, 8, 16, activation="gelu"),
}


@pytest.mark.parametrize("activation", ["ReLU", "PReLU"])
@pytest.mark.parametrize("make", PRIVATE.values(), ids=PRIVATE.keys())
def test_private_parts_beside_it_add_nothing_at_first_and_learn(
    make, activation, tokens_BND
):
    dense = FFN(embed_dims=8, feedforward_channels=16, act_cfg=dict(type=activation))
    shared = SharedExpert(8, 16, activation=activation.lower())
    block = make_block(DenseSoftmaxGate(), experts=make(), shared_expert=shared)
    for parameter in block.moe.experts.parameters():  # as after a training
        torch.nn.init.normal_(parameter)
    block.load_state_dict(dense.state_dict())
    torch.testing.assert_close(block(tokens_BND), dense(tokens_BND), rtol=0, atol=1e-6)
    block(tokens_BND).square().sum().backward()
    experts = block.moe.experts
    for name in experts.output_names:
        assert (getattr(experts, name).grad != 0).flatten(1).any(1).all()


def test_a_shared_expert_of_another_width_is_reported_by_the_loader():
    shared = SharedExpert(8, 12)
    block = make_block(TopKGate(), experts=AffineExperts(3, 8), shared_expert=shared)
    dense = FFN(embed_dims=8, feedforward_channels=16)
    with pytest.raises(RuntimeError, match="Missing key"):
        block.load_state_dict(dense.state_dict())


AFFINE = dict(
    layers=dict(encoder="all", decoder="all"),
    experts=dict(type="AffineExperts"),
    shared_expert=dict(type="SharedExpert"),
)


@pytest.mark.parametrize("moe", ["damex_best", AFFINE], ids=["low rank", "affine"])
def test_a_detector_starts_as_the_dense_one_and_resumes_as_itself(
    moe, build, make_batch, run_loss, run_predict, total
):
    def boxes(detector):
        samples = run_predict(detector, batch)
        return torch.cat([sample.pred_instances.bboxes for sample in samples])

    batch = make_batch([0, 1], sizes=[(64, 64), (64, 32)])
    dense, private, resumed = build(moe=None), build(moe=moe), build(moe=moe)
    private.load_state_dict(dense.state_dict())
    torch.testing.assert_close(boxes(private), boxes(dense), rtol=1e-4, atol=1e-3)
    optimizer = torch.optim.SGD(private.parameters(), lr=0.01)
    total(run_loss(private, batch)).backward()
    optimizer.step()
    resumed.load_state_dict(private.state_dict())
    bank = moe_blocks(resumed)[0].moe.experts
    assert getattr(bank, bank.output_names[0]).any()
    assert torch.equal(boxes(resumed), boxes(private))


@pytest.mark.parametrize("kind", ["LowRankExperts", "AffineExperts"])
def test_adapters_of_no_ffn_are_refused(kind, build):
    experts = dict(type=kind, **(dict(rank=4) if kind == "LowRankExperts" else {}))
    with pytest.raises(ConfigError, match=f"moe.experts is '{kind}', .*shared_expert="):
        build(moe=dict(layers=dict(decoder=[0]), experts=experts))


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


@pytest.mark.parametrize(("shared", "is_said"), [("gelu", True), ("relu", False)])
def test_beside_a_shared_expert_it_is_that_ones_activation(shared, is_said):
    dense = FFN(embed_dims=8, feedforward_channels=16)
    layer = MoELayer(
        router=LinearRouter(8, 2),
        gate=TopKGate(k=1),
        experts=FFNExperts(2, 8, 16, activation="gelu"),
        shared_expert=SharedExpert(8, 16, activation=shared),
    )
    block = MoEFFN(layer, name="decoder.0", context=RoutingContext(), dense=dense)
    state = torch.nn.ModuleDict(dict(ffn=dense)).state_dict()
    note = upcycling_note(torch.nn.ModuleDict(dict(ffn=block)), state)
    assert (note is not None) == is_said
    if note is not None:
        assert "moe.shared_expert.activation='relu'" in note
