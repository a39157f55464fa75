"""Layers and stages that ``moe.layers`` selects, and those that cannot be."""

import pytest
from mmdet.registry import MODELS
from torch import nn

from damex.errors import ConfigError
from damex.models.insertion import moe_blocks
from tests.test_models.test_blocks import PMOE

ON_PATCHES = dict(num_experts=4, experts=dict(type="PatchConvExperts", patch_size=1))
CHANNELS = dict(channels=dict(embedding=dict(type="ShallowEmbedding", widths=(8,))))


@pytest.mark.parametrize("moe", [ON_PATCHES, CHANNELS], ids=["experts", "channels"])
@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([4], "backbone names stage 4, but .* 4 stages: 0 to 3"),
        ("first", "backbone must be .*'all', 'even' or 'last', got 'first'"),
        ({"all": 1}, "backbone must be a list of stage numbers"),
    ],
)
def test_experts_and_channels_reject_the_same_stages(build, moe, chosen, message):
    with pytest.raises(ConfigError, match=message):
        build(moe={**moe, "layers": dict(backbone=chosen)})


def test_channels_know_the_same_words(build):
    gated = build(moe={**CHANNELS, "layers": dict(backbone="last")})
    assert {n.split(".")[1] for n in gated.channel_gating.path.names} == {"3"}


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ([3, 1], ["backbone.layer2.1.conv2", "backbone.layer4.1.conv2"]),
        ("last", ["backbone.layer4.1.conv2"]),
        ("even", ["backbone.layer1.1.conv2", "backbone.layer3.1.conv2"]),
        ("all", [f"backbone.layer{n}.1.conv2" for n in range(1, 5)]),
    ],
)
def test_chosen_stages_and_no_others_get_experts(build, chosen, names):
    detector = build(moe={**PMOE, "layers": dict(backbone=chosen)})
    assert [block.name for block in moe_blocks(detector)] == names
    kept = [m for m in detector.backbone.modules() if isinstance(m, nn.Conv2d)]
    # 20 convolutions of a ResNet-18: a stem, 16 in blocks and three for skips
    assert len(kept) == 20 - len(names)


STRIDED = dict(dilations=(1, 1, 1, 2), strides=(1, 2, 2, 1))


@pytest.mark.parametrize(
    ("chosen", "changes", "message"),
    [
        ([3, 3], {}, "stage 3: .*MoEPatchConv .listed twice"),
        ([3], dict(with_cp=True), "stage 3 is recomputed by model.backbone.with_cp"),
        ([3], dict(frozen_stages=4), "stage 3 is frozen by .*frozen_stages=4.*=3 or"),
        ([3], dict(**STRIDED, depth=50), r"stride 1 only, .* block has .*dilation=\(2"),
        ([3], STRIDED, None),  # conv2 of a basic block is never dilated
    ],
)
def test_a_backbone_that_cannot_take_experts(model_config, chosen, changes, message):
    config = model_config(moe={**PMOE, "layers": dict(backbone=chosen)})
    config.backbone.update(changes)
    if message is None:
        assert len(moe_blocks(MODELS.build(config))) == 1
        return
    with pytest.raises(ConfigError, match=message) as caught:
        MODELS.build(config)
    assert "\n" not in str(caught.value)


def test_another_backbone_is_rejected(model_config):
    config = model_config(moe=PMOE)
    config.backbone = dict(type="Darknet", out_indices=(3, 4, 5))
    with pytest.raises(ConfigError, match=r"needs a ResNet of mmdet .*got Darknet"):
        MODELS.build(config)
