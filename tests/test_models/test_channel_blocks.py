import copy

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import ResNet
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from damex.errors import ConfigError
from damex.models.context import RoutingContext
from damex.papers.channel_gating import (
    GatedFFNBlock,
    GatedResidualBlock,
    check_gateable,
)
from damex.papers.channels import ChannelGates

PLUGIN = dict(type="ContextBlock", ratio=0.25)


def block_of(**options):
    torch.manual_seed(0)
    ffn = FFN(embed_dims=8, feedforward_channels=16, **options)
    return GatedFFNBlock(ffn, name="encoder.0", context=RoutingContext())


def step(block, gates_BH):
    return block.context.step(
        gates=ChannelGates(torch.zeros(2, 1), layers={"encoder.0": gates_BH})
    )


@pytest.mark.parametrize("training", [True, False], ids=["masked", "skipping"])
@pytest.mark.parametrize(
    "options",
    [{}, dict(act_cfg=dict(type="PReLU")), dict(layer_scale_init_value=0.5)],
    ids=["relu", "prelu", "layer scale"],
)
def test_it_loads_an_ffn_and_equals_it_with_open_gates(tokens_BND, training, options):
    block = block_of(**options).train(training)
    dense = FFN(embed_dims=8, feedforward_channels=16, **options).train(training)
    block.load_state_dict(dense.state_dict())
    other_BND = torch.ones_like(tokens_BND)
    with step(block, torch.ones(2, 16)):
        torch.testing.assert_close(block(tokens_BND), dense(tokens_BND))
        torch.testing.assert_close(
            block(tokens_BND, other_BND), dense(tokens_BND, other_BND)
        )


def test_an_activation_that_moves_zero_is_refused():
    with pytest.raises(ConfigError, match=r"encoder.0: .*of 0 is not 0"):
        block_of(act_cfg=dict(type="Sigmoid"))


def resnet(depth, **options):
    torch.manual_seed(0)
    backbone = ResNet(depth, base_channels=8, zero_init_residual=False, **options)
    for norm in backbone.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return backbone


def gated_block(depth, *, stage=1, number=0):
    """A gated block, the block of mmdet with the same weights, and the context."""
    block = getattr(resnet(depth), f"layer{stage + 1}")[number]
    context = RoutingContext()
    gated = GatedResidualBlock(copy.deepcopy(block), name="b", context=context)
    return gated, block, context


def gates_for(gated, *, open_share, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layers = {
        name: torch.rand(2, count, generator=generator)
        * (torch.rand(2, count, generator=generator) < open_share)
        for name, count in gated.channels.items()
    }
    return ChannelGates(logits_BE=torch.zeros(2, 1), layers=layers)


def features(channels):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, channels, 10, 12, generator=generator).relu()


@pytest.mark.parametrize(
    ("depth", "in_channels"), [(18, 8), (50, 32)], ids=["basic", "bottleneck"]
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_open_gates_are_the_block_of_mmdet(depth, in_channels, training):
    gated, block, context = gated_block(depth)
    # Stage 1 of base width 8. Basic: both convs; bottleneck: the first two.
    channels = {"b.conv1": 16, "b.conv2": 16}
    assert gated.channels == channels
    assert list(gated.state_dict()) == list(block.state_dict())
    gated.train(training)
    block.train(training)
    ones = {name: torch.ones(2, count) for name, count in channels.items()}
    with context.step(gates=ChannelGates(torch.zeros(2, 1), ones)):
        found = gated(features(in_channels))
    torch.testing.assert_close(found, block(features(in_channels)))


@pytest.mark.parametrize(("depth", "in_channels"), [(18, 8), (50, 32)])
@pytest.mark.parametrize("open_share", [0.3, 0.0])
def test_skipping_equals_masking(depth, in_channels, open_share):
    gated, _, context = gated_block(depth)
    gated.eval()
    with context.step(gates=gates_for(gated, open_share=open_share)):
        skipped = gated(features(in_channels))
        gated.skip_closed = False
        masked = gated(features(in_channels))
    torch.testing.assert_close(skipped, masked)


def test_a_closed_basic_block_is_its_identity_path():
    gated, block, context = gated_block(18)
    gated.eval()
    x_BCHW = features(8)
    with context.step(gates=gates_for(gated, open_share=0.0)):
        found = gated(x_BCHW)
    assert torch.equal(found, block.eval().downsample(x_BCHW).relu())


def test_flops_of_a_bottleneck_by_hand():
    """The second block of a stage: 64 -> 16 -> 16 -> 64 channels, no downsampling."""
    gated, _, context = gated_block(50, number=1)
    gates = gates_for(gated, open_share=0.5)
    products = 0
    for image in range(2):
        first = int((gates.layers["b.conv1"][image] > 0).sum())
        second = int((gates.layers["b.conv2"][image] > 0).sum())
        products += 64 * first + first * second * 9 + second * 64
    gated.eval()
    with context.step(gates=gates), FlopCounterMode(display=False) as counter:
        gated(features(64))
    assert counter.get_total_flops() == 2 * 120 * products
    assert products < 2 * (64 * 16 + 16 * 16 * 9 + 16 * 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(with_cp=True), "with_cp=False"),
        (dict(norm_cfg=dict(type="GN", num_groups=4)), "b.conv1: .*batch norm"),
        (dict(plugins=[dict(cfg=PLUGIN, position="after_conv2")]), "has a plugin"),
    ],
    ids=["with_cp", "group norm", "plugin"],
)
def test_residual_that_cannot_be_gated_is_refused(options, message):
    block = resnet(50, **options).layer2[0]
    with pytest.raises(ConfigError, match=message):
        GatedResidualBlock(block, name="b", context=RoutingContext())


@pytest.mark.parametrize(
    ("conv", "norm", "message"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), nn.Identity(), "groups=1"),
        (nn.Conv2d(4, 4, 3, padding="same"), nn.Identity(), "in numbers"),
        (nn.ConvTranspose2d(4, 4, 3), nn.Identity(), "need a Conv2d"),
        (nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), "mix the channels"),
        (
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4, track_running_stats=False),
            "running statistics",
        ),
    ],
)
def test_what_cannot_be_skipped_is_refused(conv, norm, message):
    with pytest.raises(ConfigError, match=f"b.conv1: .*{message}"):
        check_gateable(conv, norm, "b.conv1")
