import copy

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN
from mmengine.config import Config

from damex.models.blocks import MoEFFN
from damex.models.context import RoutingContext
from damex.models.insertion import moe_blocks, upcycling_note
from damex.moe import (
    FFNExperts,
    LinearRouter,
    LowRankExperts,
    MoELayer,
    SharedExpert,
    TopKGate,
)
from damex.papers.dense_gates import DenseSoftmaxGate
from damex.papers.expert_choice import ExpertChoiceGate
from tests.conftest import CONFIGS


def make_block(gate, *, experts=None, shared_expert=None, num_experts=3, dense=None):
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, num_experts),
        gate=gate,
        experts=experts or FFNExperts(num_experts, 8, 16),
        shared_expert=shared_expert,
    )
    return MoEFFN(layer, name="decoder.0", context=RoutingContext(), dense=dense)


def make_ffn(activation="ReLU", width=16):
    """An FFN; the slope of a PReLU is that after a training."""
    act_cfg = dict(type=activation)
    ffn = FFN(embed_dims=8, feedforward_channels=width, act_cfg=act_cfg)
    if activation == "PReLU":
        torch.nn.init.constant_(ffn.layers[0][1].weight, -1.5)
    return ffn


@pytest.mark.parametrize("activation", ["ReLU", "PReLU"])
def test_every_expert_starts_as_the_ffn_of_a_dense_checkpoint(activation, tokens_BND):
    """Weights of a token sum to one here, so that the block equals the FFN."""
    experts = FFNExperts(3, 8, 16, activation=activation.lower())
    block = make_block(TopKGate(k=2, renormalize=True), experts=experts)
    before, other = block(tokens_BND), copy.deepcopy(block)
    router = block.moe.router.weight_ED.detach().clone()
    dense = make_ffn(activation)
    state = dense.state_dict()
    other.load_state_dict(state)
    assert set(state) == set(dense.state_dict())  # the caller's dict is unchanged
    assert torch.equal(other.moe.router.weight_ED, router)
    torch.testing.assert_close(other(tokens_BND), dense(tokens_BND))
    assert torch.equal(block(tokens_BND), before)  # a copy converts only for itself


@pytest.mark.parametrize("shared_expert", [None, SharedExpert(8, 12)])
def test_an_ffn_of_another_width_is_reported_by_the_loader(shared_expert):
    block = make_block(TopKGate(), shared_expert=shared_expert)
    with pytest.raises(RuntimeError, match="Missing key"):
        block.load_state_dict(make_ffn(width=32).state_dict())


ROUTED = {
    "FFNs": lambda: FFNExperts(3, 8, 16),
    "low rank": lambda: LowRankExperts(3, 8, 2),
    "narrower FFNs": lambda: FFNExperts(3, 8, 5),
    "FFNs with another activation": lambda: FFNExperts(3, 8, 16, activation="gelu"),
    "FFNs with a slope": lambda: FFNExperts(3, 8, 16, activation="prelu"),
}


@pytest.mark.parametrize("activation", ["ReLU", "PReLU"])
@pytest.mark.parametrize("make", ROUTED.values(), ids=ROUTED.keys())
def test_a_shared_expert_becomes_the_ffn_and_the_others_add_nothing_and_learn(
    make, activation, tokens_BND
):
    shared = SharedExpert(8, 16, activation=activation.lower())
    block = make_block(DenseSoftmaxGate(), experts=make(), shared_expert=shared)
    for parameter in block.moe.experts.parameters():  # as after a training
        torch.nn.init.normal_(parameter)
    dense = make_ffn(activation)
    block.load_state_dict(dense.state_dict())
    torch.testing.assert_close(block(tokens_BND), dense(tokens_BND), rtol=0, atol=1e-6)
    block(tokens_BND).square().sum().backward()
    experts = block.moe.experts
    for name in experts.output_names:
        assert (getattr(experts, name).grad != 0).flatten(1).any(1).all()


def test_a_detector_starts_as_the_dense_one_and_resumes_as_itself(
    build, make_batch, run_loss, run_predict, total
):
    def boxes(detector):
        samples = run_predict(detector, batch)
        return torch.cat([sample.pred_instances.bboxes for sample in samples])

    batch = make_batch([0, 1], sizes=[(64, 64), (64, 32)])
    dense = build(moe=None)
    private, resumed = build(moe="damex_best"), build(moe="damex_best")
    private.load_state_dict(dense.state_dict())
    torch.testing.assert_close(boxes(private), boxes(dense), rtol=1e-4, atol=1e-3)
    optimizer = torch.optim.SGD(private.parameters(), lr=0.01)
    total(run_loss(private, batch)).backward()
    optimizer.step()
    resumed.load_state_dict(private.state_dict())
    bank = moe_blocks(resumed)[0].moe.experts
    assert getattr(bank, bank.output_names[0]).any()
    assert torch.equal(boxes(resumed), boxes(private))


def test_the_shipped_pmoe_keeps_the_scale_of_a_dense_checkpoint(tokens_BND):
    """Each of 8 experts takes an eighth of the tokens with weights of mean 1."""
    gate = dict(Config.fromfile(CONFIGS / "_base_/moe/pmoe.py").moe.gate)
    assert gate.pop("type") == "ExpertChoiceGate"
    block = make_block(ExpertChoiceGate(**{**gate, "share": 1.0}), num_experts=8)
    torch.nn.init.zeros_(block.moe.router.weight_ED)  # equal scores
    dense = make_ffn()
    block.load_state_dict(dense.state_dict())
    added = dense(tokens_BND) - tokens_BND
    torch.testing.assert_close(block(tokens_BND), tokens_BND + 8 * added)


def note_of(block, dense):
    model, old = (torch.nn.ModuleDict(dict(ffn=one)) for one in (block, dense))
    assert upcycling_note(model, model.state_dict()) is None
    return upcycling_note(model, old.state_dict()) or ""


@pytest.mark.parametrize(
    ("gate", "shared_expert", "is_noted"),
    [
        (TopKGate(k=1), None, True),
        (TopKGate(k=1, renormalize=True), None, False),
        (TopKGate(k=1), SharedExpert(8, 16), False),
        (ExpertChoiceGate(share=0.5, mean_one=True), None, False),
    ],
)
def test_a_gate_that_scales_the_ffn_down_is_noted(gate, shared_expert, is_noted):
    note = note_of(make_block(gate, shared_expert=shared_expert), make_ffn())
    assert ("1 layers become experts with gate weights near 1/3" in note) == is_noted
    assert ("moe.gate.renormalize=True" in note) == is_noted


@pytest.mark.parametrize(
    ("trained", "shared", "field"),
    [
        ("GELU", None, ""),
        ("ReLU", None, "experts"),
        ("ReLU", "gelu", "shared_expert"),
        ("ReLU", "relu", ""),
    ],
)
def test_another_activation_is_noted(trained, shared, field):
    dense = make_ffn(trained)
    block = make_block(
        TopKGate(k=1, renormalize=True),
        experts=FFNExperts(3, 8, 16, activation="gelu"),
        shared_expert=shared and SharedExpert(8, 16, activation=shared),
        dense=dense,
    )
    note = note_of(block, dense)
    assert bool(note) == bool(field)
    if field:
        assert "1 layers were trained with relu and become experts with gelu" in note
        assert f"moe.{field}.activation='relu'" in note
