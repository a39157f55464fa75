import copy

import pytest
import torch
from torch import nn

from damex.errors import ConfigError
from damex.models.context import RoutingContext
from damex.models.insertion import insert_moe, moe_blocks

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


def test_experts_take_the_shape_of_the_ffn_that_they_replace(build):
    block = moe_blocks(build())[0]
    assert block.moe.experts.w1_EDH.shape == (3, 64, 256)
    assert block.moe.num_experts == 3


def test_each_expert_starts_at_the_scale_of_a_dense_ffn(build):
    """mmdet's init would treat the (3, 64, 256) tensor as one convolution kernel."""
    weight_EDH = moe_blocks(build())[0].moe.experts.w1_EDH
    # Xavier uniform of 64 -> 256: bound sqrt(6 / 320), std bound / sqrt(3) = 0.0791.
    assert weight_EDH.abs().max() <= (6 / 320) ** 0.5
    for expert in range(3):
        assert weight_EDH[expert].std().item() == pytest.approx(0.0791, rel=0.05)
    assert not torch.equal(weight_EDH[0], weight_EDH[1])


def test_several_experts_per_group_are_shared_out_in_order(build):
    block = moe_blocks(build(moe={**DAMEX, "num_experts": 5}, num_groups=2))[0]
    assert block.moe.group_experts_GE.int().tolist() == [
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1],
    ]


def test_a_router_that_has_groups_gets_those_of_the_mixture(build):
    router = dict(type="HierarchicalRouter")
    moe = {**DAMEX, "num_experts": 5, "router": router}
    built = moe_blocks(build(moe=moe, num_groups=2))[0].moe.router
    # as the experts of the groups: three and two
    assert built.slot_GS.tolist() == [[0, 1, 2], [3, 4, 5]]
    own = {**moe, "router": {**router, "num_groups": 4}}
    assert moe_blocks(build(moe=own, num_groups=2))[0].moe.router.num_groups == 4


def test_groups_are_needed_outside_of_a_mixture_by_a_router_that_has_them(build):
    moe = dict(
        layers=dict(decoder=[0]), num_experts=4, router=dict(type="HierarchicalRouter")
    )
    with pytest.raises(ConfigError, match=r"moe.router = .*'num_groups'"):
        build(moe=moe, num_groups=None)


def test_the_config_is_not_changed(model_config):
    from mmdet.registry import MODELS

    config = model_config(moe=copy.deepcopy(DAMEX))
    before = copy.deepcopy(config.moe)
    MODELS.build(config)
    assert config.moe == before


def test_the_report_names_every_layer(build):
    dense = build(moe=None)
    report = insert_moe(dense, DAMEX, context=RoutingContext(), num_groups=3)
    # One FFN 64-256-64: 64*256 + 256 + 256*64 + 64 = 33,088; three and a 64 x 3 router.
    assert [row.name for row in report.layers] == ["decoder.0", "decoder.2"]
    assert report.layers[0].dense_parameters == 33_088
    assert report.layers[0].moe_parameters == 3 * 33_088 + 64 * 3
    assert "decoder.2: FFN 64-256-64" in str(report)


def test_number_of_experts_is_needed_outside_of_a_mixture(build):
    with pytest.raises(ConfigError, match="num_experts is not set"):
        build(moe=DAMEX, num_groups=None)


def test_an_ffn_of_another_shape_is_refused(model_config):
    from mmdet.registry import MODELS

    config = model_config()
    config.decoder.layer_cfg.ffn_cfg.num_fcs = 3
    with pytest.raises(ConfigError, match="num_fcs=2"):
        MODELS.build(config)


def test_dense_detector_has_no_experts(build):
    detector = build(moe=None)
    assert moe_blocks(detector) == []
    assert isinstance(detector, nn.Module)


@pytest.mark.parametrize(
    ("gate", "loss", "is_idle"),
    [
        (dict(type="DenseSoftmaxGate"), dict(), True),
        (dict(type="ExpertChoiceGate", share=0.25), dict(), True),
        (dict(type="TopKGate", k=1), dict(), False),
        (
            dict(type="ExpertChoiceGate", share=0.25),
            dict(tokens="foreground"),
            False,
        ),
        (dict(type="DenseSoftmaxGate"), dict(scores="logit"), False),
    ],
)
def test_a_note_tells_of_a_balance_loss_that_cannot_act(
    build, make_batch, run_loss, gate, loss, is_idle
):
    """It is given where the loss has no gradient, and nowhere else."""
    moe = dict(
        layers=dict(encoder=[0]),
        num_experts=3,
        gate=gate,
        losses=[dict(type="LoadBalanceLoss", weight=1.0, **loss)],
    )
    detector = build(moe=moe)
    (block,) = moe_blocks(detector)
    run_loss(detector, make_batch([0, 1]))["loss_moe_load_balance"].backward()
    grad = block.moe.router.weight_ED.grad.abs().max().item()
    assert (grad < 1e-6) == is_idle
    report = insert_moe(build(moe=None), moe, context=RoutingContext(), num_groups=None)
    assert len(report.notes) == is_idle
    if is_idle:
        assert gate["type"] in report.notes[0]
