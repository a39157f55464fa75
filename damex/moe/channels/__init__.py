"""DeepMoE (Wang et al. 2019): the channels of a layer as experts, gated per image."""

from damex.moe.channels.gates import (
    ChannelGate,
    ChannelGates,
    GatingPath,
    ShallowEmbedding,
    check_activation,
)
from damex.moe.channels.layers import (
    GatedConv2d,
    check_gateable,
    gated_conv2d,
    gated_ffn,
)
from damex.moe.channels.losses import (
    active_share,
    distinct_patterns,
    gate_l1,
    presence_loss,
)

__all__ = [
    "ChannelGate",
    "ChannelGates",
    "GatedConv2d",
    "GatingPath",
    "ShallowEmbedding",
    "active_share",
    "check_activation",
    "check_gateable",
    "distinct_patterns",
    "gate_l1",
    "gated_conv2d",
    "gated_ffn",
    "presence_loss",
]
