"""The mathematics of mixtures of experts; imports torch and nothing else."""

from damex.moe.assignment import Assignment
from damex.moe.channels import (
    ChannelGate,
    ChannelGates,
    GatedConv2d,
    GatedFFN,
    GatingPath,
    ShallowEmbedding,
    active_share,
    check_gateable,
    distinct_patterns,
    gate_l1,
    gated_conv2d,
    gated_ffn,
    presence_loss,
)
from damex.moe.experts import FFNExperts
from damex.moe.gates import (
    BiasBalancer,
    DenseSoftmaxGate,
    DenseToSparseGate,
    ExpertCapacity,
    ExpertChoiceGate,
    TopKGate,
)
from damex.moe.grouped import grouped_linear
from damex.moe.groups import expert_groups
from damex.moe.joined_optimizer import JoinedOptimizer
from damex.moe.layer import MoELayer, group_experts_mask
from damex.moe.losses import (
    DatasetRoutingLoss,
    ImportanceLoss,
    LoadBalanceLoss,
    LoadLoss,
    RouterZLoss,
    SeparateRouterLoss,
    dataset_routing_loss,
    importance_loss,
    load_balance_loss,
    load_loss,
    router_z_loss,
    separate_router_loss,
)
from damex.moe.metrics import (
    coefficient_of_variation,
    dispatch_counts,
    dispatch_entropy,
    dropped_counts,
    dropped_share,
    expert_load,
    heaviest_expert,
    mutual_information,
    own_expert_counts,
    own_expert_share,
)
from damex.moe.optim import NormalizedGD, expert_parameters
from damex.moe.patch_conv import PatchConvExperts, route_patches
from damex.moe.patches import (
    merge_patches,
    patch_grid,
    real_patches,
    split_patches,
)
from damex.moe.protocols import Experts, Gate, Router, RoutingLoss
from damex.moe.record import RoutingRecord
from damex.moe.routers import (
    CosineRouter,
    HierarchicalRouter,
    LinearRouter,
    MLPRouter,
)
from damex.moe.shared_expert import SharedExpert
from damex.moe.split import (
    load_dense_split,
    repeat_router_rows,
    split_hidden_dims,
)

__all__ = [
    "Assignment",
    "BiasBalancer",
    "ChannelGate",
    "ChannelGates",
    "CosineRouter",
    "DatasetRoutingLoss",
    "DenseSoftmaxGate",
    "DenseToSparseGate",
    "ExpertCapacity",
    "ExpertChoiceGate",
    "Experts",
    "FFNExperts",
    "Gate",
    "GatedConv2d",
    "GatedFFN",
    "GatingPath",
    "HierarchicalRouter",
    "ImportanceLoss",
    "JoinedOptimizer",
    "LinearRouter",
    "LoadBalanceLoss",
    "LoadLoss",
    "MLPRouter",
    "MoELayer",
    "NormalizedGD",
    "PatchConvExperts",
    "Router",
    "RouterZLoss",
    "RoutingLoss",
    "RoutingRecord",
    "SeparateRouterLoss",
    "ShallowEmbedding",
    "SharedExpert",
    "TopKGate",
    "active_share",
    "check_gateable",
    "coefficient_of_variation",
    "dataset_routing_loss",
    "dispatch_counts",
    "dispatch_entropy",
    "distinct_patterns",
    "dropped_counts",
    "dropped_share",
    "expert_groups",
    "expert_load",
    "expert_parameters",
    "gate_l1",
    "gated_conv2d",
    "gated_ffn",
    "group_experts_mask",
    "grouped_linear",
    "heaviest_expert",
    "importance_loss",
    "load_balance_loss",
    "load_dense_split",
    "load_loss",
    "merge_patches",
    "mutual_information",
    "own_expert_counts",
    "own_expert_share",
    "patch_grid",
    "presence_loss",
    "real_patches",
    "repeat_router_rows",
    "route_patches",
    "router_z_loss",
    "separate_router_loss",
    "split_hidden_dims",
    "split_patches",
]
