"""Initial weights: with experts and without, one seed draws the same detector."""

import pytest
import torch
from mmengine.config import Config

from damex.models.blocks import ffns_in_place
from damex.models.insertion import moe_blocks
from damex.models.starts import fork_rng
from tests.conftest import CONFIGS

DENSE = dict(moe=None, num_groups=2)
EVERYWHERE = dict(layers=dict(encoder="all", decoder="all"))
KINDS = dict(
    whole_ffns=dict(EVERYWHERE, num_experts=3),
    shared=dict(EVERYWHERE, shared_expert=dict(type="SharedExpert")),
    dense_phase=dict(EVERYWHERE, upcycling=dict(share=0.5)),
    fine_grained=dict(EVERYWHERE, fine_grained=dict(parts=2, copies=2)),
    normed=dict(EVERYWHERE, block=dict(norm="pre")),
)


def first_expert(block):
    """The expert that replaces the FFN, alone or as its parts together."""
    shared = block.moe.shared_expert
    experts = block.moe.experts if shared is None else shared.expert
    parts = 1 if block.split is None else block.split.parts
    w1_HD = torch.cat(tuple(experts.w1_EDH[:parts]), dim=1).t()
    w2_DH = torch.cat(tuple(experts.w2_EHD[:parts]), dim=0).t()
    return w1_HD, w2_DH


@pytest.mark.parametrize("seed", [None, 3])
def test_no_generator_is_left_changed(seed, monkeypatch):
    gpu, reseeded = torch.Generator(), []  # a stand-in for that of a GPU
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    # Before CUDA is set up, torch would keep the seed until then.
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)
    generators = torch.default_generator, gpu
    states = [generator.get_state() for generator in generators]
    with fork_rng(seed):
        first = [torch.rand(3, generator=generator) for generator in generators]
    with fork_rng(seed):
        again = [torch.rand(3, generator=generator) for generator in generators]
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, states, [one.get_state() for one in generators]))
    assert reseeded == []


def test_ffns_are_drawn_where_the_detector_is(build):
    """On a GPU its generator draws for the dense detector, and not that of the CPU."""
    detector = build(moe=KINDS["shared"], num_groups=2).to("meta")
    with ffns_in_place(detector) as places:
        devices = {p.device.type for _, ffn in places for p in ffn.parameters()}
    assert devices == {"meta"}


@pytest.mark.parametrize("kind", KINDS)
def test_all_but_the_experts_is_drawn_as_for_the_dense_detector(kind, build):
    dense, expected = build(**DENSE), torch.rand(3)
    detector, found = build(moe=KINDS[kind], num_groups=2), torch.rand(3)
    assert torch.equal(found, expected)  # what a training draws next
    theirs, ours = (dict(d.named_parameters()) for d in (dense, detector))
    # The last norm of a layer may move into its block; norms are not drawn.
    rest = {name for name in theirs if ".ffn." not in name and ".norms." not in name}
    assert rest <= ours.keys()
    for name in rest:
        assert torch.equal(ours[name], theirs[name]), name
    # The part of a block that replaces the FFN has its draws.
    is_copied = kind in ("shared", "dense_phase", "fine_grained")
    parts = (dense.encoder, dense.decoder)
    ffns = [layer.ffn.layers for part in parts for layer in part.layers]
    for block, layers in zip(moe_blocks(detector), ffns, strict=True):
        w1_HD, w2_DH = first_expert(block)
        assert torch.equal(w1_HD, layers[0][0].weight) == is_copied
        assert torch.equal(w2_DH, layers[1].weight) == is_copied
        if kind == "shared":
            biases = block.moe.shared_expert.expert.b1_EH
            assert torch.equal(biases[0], layers[0][0].bias)


def test_a_custom_initializer_is_kept(build):
    experts = dict(type="FFNExperts", init_std=0.005)
    moe = dict(KINDS["dense_phase"], experts=experts)
    detector = build(moe=moe, num_groups=2)
    for block in moe_blocks(detector):
        assert block.moe.experts.w1_EDH[0].std().item() == pytest.approx(0.005, rel=0.1)


def test_the_first_step_of_the_recipe_is_that_of_the_dense_detector(
    build, make_batch, run_loss
):
    """Noise of denoising queries included: no gate draws before it is drawn."""
    recipe = Config.fromfile(CONFIGS / "_base_/moe/damex_best.py").moe.to_dict()
    batch = make_batch([0, 1])
    dense = run_loss(build(**DENSE), batch)
    losses = run_loss(build(moe=recipe, num_groups=2), batch)
    assert "loss_moe_dataset_routing" in losses
    for name, value in dense.items():
        torch.testing.assert_close(losses[name], value, rtol=1e-5, atol=1e-6)
