"""Groups of datasets per expert, and several experts per group, by config."""

import logging

import pytest
import torch
from mmdet.registry import MODELS

from damex.errors import ConfigError
from damex.models.config import read_moe
from damex.models.context import RoutingContext
from damex.models.insertion import insert_moe, moe_blocks
from tests.test_models.test_blocks import PMOE

DAMEX = dict(
    layers=dict(decoder=[0, 2]),
    gate=dict(type="TopKGate", k=1),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (dict(decoder="even"), ["decoder.0", "decoder.2"]),
        (dict(decoder=[1]), ["decoder.1"]),
        (dict(encoder="all"), ["encoder.0", "encoder.1"]),
        (dict(encoder=[1], decoder=[0]), ["encoder.1", "decoder.0"]),
    ],
)
def test_chosen_layers_and_no_others_become_experts(build, layers, names):
    detector = build(moe={**DAMEX, "layers": layers})
    assert [block.name for block in moe_blocks(detector)] == names
    for part in ("encoder", "decoder"):
        for number, layer in enumerate(getattr(detector, part).layers):
            replaced = type(layer.ffn).__name__ == "MoEFFN"
            assert replaced == (f"{part}.{number}" in names)


def test_each_expert_starts_at_the_scale_of_a_dense_ffn(build):
    """mmdet's init would treat the (3, 64, 256) tensor as one convolution kernel."""
    weight_EDH = moe_blocks(build())[0].moe.experts.w1_EDH
    # Xavier uniform of 64 -> 256: bound sqrt(6 / 320), std bound / sqrt(3) = 0.0791.
    assert weight_EDH.abs().max() <= (6 / 320) ** 0.5
    for expert in range(3):
        assert weight_EDH[expert].std().item() == pytest.approx(0.0791, rel=0.05)
    assert not torch.equal(weight_EDH[0], weight_EDH[1])


def test_a_router_that_has_groups_gets_those_of_the_mixture(build):
    router = dict(type="HierarchicalRouter")
    moe = {**DAMEX, "num_experts": 5, "router": router}
    built = moe_blocks(build(moe=moe, num_groups=2))[0].moe.router
    # as the experts of the groups: three and two
    assert built.slot_GS.tolist() == [[0, 1, 2], [3, 4, 5]]
    own = {**moe, "router": {**router, "num_groups": 4}}
    assert moe_blocks(build(moe=own, num_groups=2))[0].moe.router.num_groups == 4


@pytest.mark.parametrize(
    ("moe", "num_groups", "message"),
    [
        (DAMEX, None, "num_experts is not set"),
        (dict(router=dict(type="HierarchicalRouter")), None, "router = .*'num_groups'"),
        (dict(losses=DAMEX["losses"]), 17, "17 dataset groups .*set num_experts=17"),
        (dict(router=dict(type="HierarchicalRouter")), 17, "17 dataset groups"),
    ],
)
def test_groups_that_a_module_needs(build, moe, num_groups, message):
    options = {} if moe is DAMEX else dict(layers=dict(decoder=[0]), num_experts=4)
    with pytest.raises(ConfigError, match=message):
        build(moe={**options, **moe}, num_groups=num_groups)


GATED = dict(
    layers=dict(decoder=[0]),
    channels=dict(embedding=dict(type="ShallowEmbedding", widths=(8,))),
)


@pytest.mark.parametrize("moe", [DAMEX, GATED], ids=["experts", "channels"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_fcs=3), "decoder: layer 0 has an FFN with num_fcs=3 .* num_fcs=2"),
        (dict(add_identity=False), "add_identity=False; it must have"),
    ],
)
def test_an_ffn_of_another_shape_is_refused(model_config, moe, options, message):
    config = model_config(moe=moe)
    config.decoder.layer_cfg.ffn_cfg.update(options)
    with pytest.raises(ConfigError, match=message):
        MODELS.build(config)


def insert(build, moe, num_groups=None):
    dense = build(moe=None)
    assert moe_blocks(dense) == []
    context = RoutingContext()
    return insert_moe(dense, read_moe(moe), context=context, num_groups=num_groups)


CHOICE = dict(type="ExpertChoiceGate", share=0.25)
BALANCE = dict(type="LoadBalanceLoss", weight=1.0)
HIERARCHY = dict(type="HierarchicalRouter", num_groups=3)
Z_LOSS = dict(type="RouterZLoss", weight=1.0)


@pytest.mark.parametrize(
    ("parts", "loss", "idle"),
    [
        (dict(gate=dict(type="DenseSoftmaxGate")), BALANCE, "DenseSoftmaxGate"),
        (dict(gate=CHOICE), BALANCE, "ExpertChoiceGate"),
        (dict(gate=CHOICE), dict(BALANCE, tokens="foreground"), None),
        (dict(gate=dict(type="TopKGate", k=1)), BALANCE, None),
        (dict(router=HIERARCHY), Z_LOSS, "HierarchicalRouter"),
        (dict(router=HIERARCHY), BALANCE, None),
        (dict(), Z_LOSS, None),
    ],
)
def test_a_loss_without_a_gradient_is_noted(
    build, make_batch, run_loss, parts, loss, idle
):
    moe = dict(layers=dict(encoder=[0]), num_experts=3, losses=[loss], **parts)
    detector = build(moe=moe)
    (block,) = moe_blocks(detector)
    losses = run_loss(detector, make_batch([0, 1]))
    (name,) = (one for one in losses if one.startswith("loss_moe_"))
    losses[name].backward()
    grads = [one.grad.abs().max().item() for one in block.moe.router.parameters()]
    assert (max(grads) < 1e-5) == (idle is not None)
    assert [idle in note for note in insert(build, moe).notes] == [True] * bool(idle)


# One FFN 64-256-64: 64*256 + 256 + 256*64 + 64 = 33,088; three and a 64 x 3 router.
FFNS = "FFN 64-256-64 (33,088 parameters) -> 3 experts (99,456)"
# 256 x 256 x 9 weights; as many in the experts and 256 x 4 in the router
CONV = "convolution 256-256 3x3 (589,824 parameters) -> 4 experts (590,848)"


@pytest.mark.parametrize(
    ("moe", "rows"),
    [
        (DAMEX, (f"decoder.0: {FFNS}", f"decoder.2: {FFNS}")),
        (PMOE, (f"backbone.layer4.1.conv2: {CONV}",)),
    ],
)
def test_the_report_names_every_layer(build, moe, rows):
    report = insert(build, moe, 3)
    assert report.rows == rows
    assert str(report).endswith(f"\n  {rows[-1]}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layers=dict(backbone=[])), r"chooses no layer.*dict\(backbone=\[3\]\)"),
        (dict(layers=dict(decoder=[0])), "replaces convolutions; set moe.layers"),
        (dict(experts=None), "convolve patches; .*got the type 'FFNExperts'"),
        (dict(shared_expert=dict(type="SharedExpert")), "moe.shared_expert is for FF"),
        (dict(num_experts=5), "moe.experts = .*5 experts and 256 channels"),
        (dict(experts=dict(type="PatchConvExperts")), "moe.experts = .*'patch_size'"),
    ],
)
def test_patches_that_cannot_work_name_field_value_and_choice(build, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(moe={**PMOE, **changes})


def moe(*, k, num_experts, **changes):
    return dict(
        layers=dict(decoder=[0]),
        num_experts=num_experts,
        gate=dict(type="TopKGate", k=k),
        losses=[dict(type="DatasetRoutingLoss", weight=1.0)],
        **changes,
    )


def test_tokens_learn_to_go_to_the_experts_of_their_group(
    build, make_batch, run_loss, run_predict
):
    """Two each, where one group has three experts and the other two."""
    detector = build(moe=moe(k=2, num_experts=5), num_groups=2)
    batch = make_batch([0, 1, 0, 1])
    for group, image in zip([0, 1, 0, 1], batch["inputs"], strict=True):
        image.copy_(image // 4 + 190 * group)  # dark and bright
    block = moe_blocks(detector)[0]
    experts = [row.nonzero().flatten() for row in block.moe.group_experts_GE]
    assert sorted(torch.cat(experts).tolist()) == list(range(5))
    optimizer = torch.optim.AdamW(detector.parameters(), lr=2e-3)
    for _ in range(12):
        losses = run_loss(detector, batch)
        optimizer.zero_grad()
        losses["loss_moe_dataset_routing"].backward()
        optimizer.step()
    assert losses["moe_routing_accuracy"] > 0.95
    samples = run_predict(detector, batch)
    for group, sample in zip([0, 1, 0, 1], samples, strict=True):
        counts = torch.tensor(sample.routing_counts["decoder.0"])
        assert counts[experts[group]].sum() > 0.9 * counts.sum()


def test_k_beyond_the_smallest_group_is_noted_in_the_log(build, monkeypatch):
    for k, num_experts in ((1, 3), (2, 6)):
        assert insert(build, moe(k=k, num_experts=num_experts), 3).notes == ()
    assert insert(build, {**moe(k=2, num_experts=5), "losses": None}, 3).notes == ()
    (note,) = insert(build, moe(k=2, num_experts=5), 3).notes  # groups of 2, 2 and 1
    assert "k is 2, but a dataset group has 1 of the 5 experts" in note
    assert note.endswith("set k=1, or num_experts=6 or more.")
    logged = {}
    monkeypatch.setattr(
        "damex.models.detectors.print_log",
        lambda text, level, **_: logged.update({text: level}),
    )
    build(moe=moe(k=2, num_experts=5), num_groups=3)
    assert logged[note] == logging.WARNING


@pytest.mark.parametrize("name", ["cosine", "hierarchical", "fine_grained"])
def test_many_datasets_need_no_expert_each_where_nothing_asks_for_it(
    build, make_batch, run_loss, run_predict, name
):
    detector = build(moe=name, num_groups=17)
    batch = make_batch([0, 16])
    losses = run_loss(detector, batch)
    assert "moe_routing_accuracy" not in losses
    assert torch.isfinite(losses["loss_moe_load_balance"])
    samples = run_predict(detector, batch)
    assert "group_experts" not in samples[0]
    assert "routing_counts" in samples[0]


@pytest.mark.parametrize(
    ("gate", "losses", "is_noted"),
    [
        (dict(type="ExpertChoiceGate", share=0.5, weights="one"), [], True),
        (dict(type="TopKGate", k=1, renormalize=True), [], True),
        (dict(type="TopKGate", k=1, renormalize=True), [0.0], True),
        (dict(type="TopKGate", k=1, renormalize=True), [0.1], False),
        (dict(type="TopKGate", k=2, renormalize=True), [], False),
        (dict(type="TopKGate", k=1), [], False),
    ],
)
def test_a_router_that_nothing_teaches_is_noted(build, gate, losses, is_noted):
    losses = [dict(type="LoadBalanceLoss", weight=weight) for weight in losses]
    moe = dict(layers=dict(encoder=[0]), num_experts=3, gate=gate, losses=losses)
    notes = " ".join(insert(build, moe).notes)
    assert ("nothing teaches the router" in notes) == is_noted
