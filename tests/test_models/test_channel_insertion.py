import copy

import pytest
from mmdet.registry import MODELS

from damex.errors import ConfigError
from damex.models.channels import insert_channels
from damex.models.config import read_moe
from damex.models.context import RoutingContext

CHANNELS = dict(
    layers=dict(backbone=[2]),
    channels=dict(embedding=dict(type="ShallowEmbedding", widths=(8, 16))),
)


def test_the_report_names_every_layer_and_the_cost(build):
    config = read_moe({**CHANNELS, "layers": dict(backbone=[2], decoder=[1])})
    gating, report = insert_channels(
        build(moe=None),
        config.layers,
        config.channels,
        context=RoutingContext(),
        num_groups=3,
    )
    # Base width 32: stage 2 has two blocks of two convs of 128 channels.
    assert dict(report.channels) == {
        "backbone.2.0.conv1": 128,
        "backbone.2.0.conv2": 128,
        "backbone.2.1.conv1": 128,
        "backbone.2.1.conv2": 128,
        "decoder.1": 256,
    }
    # Convs 3*8*9 and 8*16*9, norms 2*8 and 2*16, linear 16*4 + 4; heads 4 * 768.
    assert report.parameters == 216 + 1152 + 16 + 32 + 68 + 4 * 768
    assert "gates on 768 channels of 5 layers (4,556 parameters more):" in str(report)
    assert "  backbone.2.1.conv2: 128 channels" in str(report)
    assert gating.path.names == tuple(report.channels)


def test_defaults_are_those_of_the_paper(build):
    gating = build(moe=CHANNELS).channel_gating
    assert (gating.settings.l1_weight, gating.settings.aux_weight) == (1e-3, 1.0)
    assert gating.settings.aux_target == "classes"
    assert not gating.path.frozen


def test_the_config_is_not_changed(model_config):
    config = model_config(moe=copy.deepcopy(CHANNELS))
    before = copy.deepcopy(config.moe)
    MODELS.build(config)
    assert config.moe == before


def test_without_auxiliary_loss_the_embedding_has_any_size(build):
    embedding = dict(type="ShallowEmbedding", widths=(8,), embed_dims=7)
    moe = {**CHANNELS, "channels": dict(embedding=embedding, aux_weight=0)}
    assert build(moe=moe).channel_gating.path.embedding.embed_dims == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(router=dict(type="LinearRouter")), "no use for moe.router"),
        (dict(gate=dict(type="TopKGate")), "no use for moe.gate"),
        (dict(losses=[]), "no use for moe.losses"),
        (dict(num_experts=2), "no use for moe.num_experts"),
        (dict(channels=[1]), r"moe.channels must be a dict .*, got \[1\]"),
        (dict(layers=dict(backbone=[2, 2])), "listed twice"),
        (dict(layers=dict(decoder=[0, 0])), "listed twice"),
        (dict(layers=dict(decoder=[9])), "names layer 9"),
        (dict(layers=dict(neck=[0])), "unknown key 'neck'"),
        (dict(layers=dict(backbone=[])), "chooses no layer"),
        (dict(layers=None), "chooses no layer"),
    ],
)
def test_a_choice_that_cannot_work_is_named(build, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(moe={**CHANNELS, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(l1_wieght=1), "key 'l1_wieght'; did you mean 'l1_weight'"),
        (dict(l1_weight=-0.1), "l1_weight must be a number of 0 or more, got -0.1"),
        (dict(l1_weight=float("nan")), "l1_weight must be .*got nan"),
        (dict(aux_weight="1"), "aux_weight must be .*got '1'"),
        (dict(aux_weight=True), "aux_weight must be .*got True"),
        (dict(aux_target="boxes"), r"one of \('classes', 'datasets'\), got 'boxes'"),
        (dict(gate_init="zeros"), "gate_init: .*'zeros'.*'ones'"),
        (dict(frozen=1), "frozen must be True or False, got 1"),
        (dict(skip_closed=None), "skip_closed must be True or False, got None"),
        (dict(embedding=dict(type="Shallow")), "embedding has the unknown type"),
        (dict(embedding=dict(widths=())), "channels.embedding = .*positive widths"),
        (dict(embedding=dict(embed_dims=7)), "embed_dims is 7, .* tells 4 classes"),
    ],
)
def test_a_setting_that_cannot_work_is_named(build, changes, message):
    channels = {**CHANNELS["channels"], **changes}
    with pytest.raises(ConfigError, match=message):
        build(moe={**CHANNELS, "channels": channels})


def test_datasets_need_a_mixture(build):
    channels = {**CHANNELS["channels"], "aux_target": "datasets"}
    with pytest.raises(ConfigError, match="no mixture to take the dataset groups"):
        build(moe={**CHANNELS, "channels": channels}, num_groups=None)


def test_other_backbones_are_refused(model_config):
    config = model_config(moe=CHANNELS)
    config.backbone = dict(type="MobileNetV2", out_indices=(2, 4, 6))
    with pytest.raises(ConfigError, match=r"needs a ResNet of mmdet .*MobileNetV2"):
        MODELS.build(config)


def test_blocks_of_resnext_are_refused(build):
    backbone = dict(type="ResNeXt", depth=50, groups=4, base_width=4)
    with pytest.raises(ConfigError, match=r"backbone.2.0 is a resnext.Bottleneck; ch"):
        build(moe=CHANNELS, backbone=backbone)
