"""Routers: tokens -> logits over experts, one per file."""

from damex.moe.routers.cosine import CosineRouter
from damex.moe.routers.hierarchical import HierarchicalRouter
from damex.moe.routers.linear import LinearRouter
from damex.moe.routers.mlp import MLPRouter

__all__ = ["CosineRouter", "HierarchicalRouter", "LinearRouter", "MLPRouter"]
