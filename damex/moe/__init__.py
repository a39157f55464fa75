"""The mathematics of mixtures of experts; imports torch and nothing else."""

from damex.moe.adapters import AffineExperts, LowRankExperts
from damex.moe.channels.gates import (
    ChannelGate,
    ChannelGates,
    GatingPath,
    ShallowEmbedding,
)
from damex.moe.channels.layers import (
    check_activation,
    check_gateable,
    gated_conv2d,
    gated_ffn,
)
from damex.moe.channels.losses import active_share, gate_l1, presence_loss
from damex.moe.expert_gradients import (
    ExpertGradients,
    sharded_layers,
    sharded_names,
    whole_experts,
)
from damex.moe.experts import FFNExperts, SharedExpert
from damex.moe.gates import Gate
from damex.moe.gates.balancing import BiasBalancer, ExpertCapacity
from damex.moe.gates.dense import DenseSoftmaxGate, DenseToSparseGate
from damex.moe.gates.expert_choice import ExpertChoiceGate
from damex.moe.gates.topk import TopKGate
from damex.moe.group_choice import (
    GroupChoice,
)
from damex.moe.grouped import grouped_linear
from damex.moe.layer import MoELayer
from damex.moe.losses import (
    DatasetRoutingLoss,
    ImportanceLoss,
    LoadBalanceLoss,
    LoadLoss,
    RouterZLoss,
    RoutingLoss,
    SeparateRouterLoss,
)
from damex.moe.metrics import (
    dispatch_counts,
    dispatch_entropy,
    dropped_counts,
    mutual_information,
    routing_hits,
    top1_expert,
)
from damex.moe.optim import (
    ChainedOptimizer,
    NormalizedGD,
    copy_expert_to_all,
    decay_to_mean,
    expert_parameters,
)
from damex.moe.patches import PatchConvExperts, real_patches, route_patches
from damex.moe.routers import CosineRouter, HierarchicalRouter, LinearRouter, MLPRouter
from damex.moe.routing import Assignment, Packing, RoutingRecord, expert_groups
from damex.moe.shards import ExpertShards
from damex.moe.split import (
    load_dense_split,
    load_shared_split,
    repeat_router_rows,
    shared_hidden_dims,
    split_hidden_dims,
)
from damex.moe.tally import LayerTally, RoutingTally, add_tallies, entropy

__all__ = [
    "AffineExperts",
    "Assignment",
    "BiasBalancer",
    "ChainedOptimizer",
    "ChannelGate",
    "ChannelGates",
    "CosineRouter",
    "DatasetRoutingLoss",
    "DenseSoftmaxGate",
    "DenseToSparseGate",
    "ExpertCapacity",
    "ExpertChoiceGate",
    "ExpertGradients",
    "ExpertShards",
    "FFNExperts",
    "Gate",
    "GatingPath",
    "GroupChoice",
    "HierarchicalRouter",
    "ImportanceLoss",
    "LayerTally",
    "LinearRouter",
    "LoadBalanceLoss",
    "LoadLoss",
    "LowRankExperts",
    "MLPRouter",
    "MoELayer",
    "NormalizedGD",
    "Packing",
    "PatchConvExperts",
    "RouterZLoss",
    "RoutingLoss",
    "RoutingRecord",
    "RoutingTally",
    "SeparateRouterLoss",
    "ShallowEmbedding",
    "SharedExpert",
    "TopKGate",
    "active_share",
    "add_tallies",
    "check_activation",
    "check_gateable",
    "copy_expert_to_all",
    "decay_to_mean",
    "dispatch_counts",
    "dispatch_entropy",
    "dropped_counts",
    "entropy",
    "expert_groups",
    "expert_parameters",
    "gate_l1",
    "gated_conv2d",
    "gated_ffn",
    "grouped_linear",
    "load_dense_split",
    "load_shared_split",
    "mutual_information",
    "presence_loss",
    "real_patches",
    "repeat_router_rows",
    "route_patches",
    "routing_hits",
    "sharded_layers",
    "sharded_names",
    "shared_hidden_dims",
    "split_hidden_dims",
    "top1_expert",
    "whole_experts",
]
