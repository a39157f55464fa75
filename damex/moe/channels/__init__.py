"""DeepMoE (Wang et al. 2019): the channels of a layer as experts, gated per image."""

from damex.moe.channels.activation import check_activation
from damex.moe.channels.gate import ChannelGate
from damex.moe.channels.gated_conv import GatedConv2d, check_gateable, gated_conv2d
from damex.moe.channels.gated_ffn import GatedFFN, gated_ffn
from damex.moe.channels.gating_path import ChannelGates, GatingPath
from damex.moe.channels.losses import gate_l1, presence_loss
from damex.moe.channels.metrics import active_share, distinct_patterns
from damex.moe.channels.shallow_embedding import ShallowEmbedding

__all__ = [
    "ChannelGate",
    "ChannelGates",
    "GatedConv2d",
    "GatedFFN",
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
