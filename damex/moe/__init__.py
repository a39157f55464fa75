"""The mathematics of mixtures of experts and its public names; needs torch only."""

# ruff: noqa: F401

from damex.moe.experts import FFNExperts, LowRankExperts, SharedExpert
from damex.moe.gates import BiasBalancer, ExpertCapacity, Gate, TopKGate
from damex.moe.grouped import grouped_linear
from damex.moe.layer import Experts, MoELayer
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
    LayerTally,
    add_tallies,
    dispatch_counts,
    dispatch_entropy,
    dropped_counts,
    entropy,
    mutual_information,
    routing_hits,
    top1_expert,
)
from damex.moe.optim import (
    ChainedOptimizer,
    Muon,
    NormalizedGD,
    copy_expert_to_all,
    decay_to_mean,
    expert_parameters,
)
from damex.moe.routers import (
    CosineRouter,
    HierarchicalRouter,
    LinearRouter,
    MLPRouter,
    Router,
    expert_groups,
)
from damex.moe.routing import Assignment, GroupChoice, Packing, RoutingRecord, restrict
from damex.moe.shards import (
    ExpertGradients,
    ExpertShards,
    gathered_experts,
    sharded_layers,
    sharded_names,
)
