"""Routing losses, one per file: a pure function and a frozen class for configs."""

from damex.moe.losses.dataset_routing import DatasetRoutingLoss, dataset_routing_loss
from damex.moe.losses.importance import ImportanceLoss, importance_loss
from damex.moe.losses.load import LoadLoss, load_loss
from damex.moe.losses.load_balance import LoadBalanceLoss, load_balance_loss
from damex.moe.losses.router_z import RouterZLoss, router_z_loss
from damex.moe.losses.separate_router import SeparateRouterLoss, separate_router_loss

__all__ = [
    "DatasetRoutingLoss",
    "ImportanceLoss",
    "LoadBalanceLoss",
    "LoadLoss",
    "RouterZLoss",
    "SeparateRouterLoss",
    "dataset_routing_loss",
    "importance_loss",
    "load_balance_loss",
    "load_loss",
    "router_z_loss",
    "separate_router_loss",
]
