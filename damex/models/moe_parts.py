"""The parts of ``damex.moe`` under their names in mmdet's registry.

The core knows no registry; a part of a user's own is added the same way, with
``MODELS.register_module()``.
"""

from __future__ import annotations

from mmdet.registry import MODELS

from damex import moe

MOE_PARTS = (
    moe.LinearRouter,
    moe.MLPRouter,
    moe.CosineRouter,
    moe.HierarchicalRouter,
    moe.TopKGate,
    moe.DenseSoftmaxGate,
    moe.DenseToSparseGate,
    moe.ExpertChoiceGate,
    moe.BiasBalancer,
    moe.ExpertCapacity,
    moe.FFNExperts,
    moe.PatchConvExperts,
    moe.SharedExpert,
    moe.ShallowEmbedding,
    moe.DatasetRoutingLoss,
    moe.LoadBalanceLoss,
    moe.ImportanceLoss,
    moe.LoadLoss,
    moe.RouterZLoss,
    moe.SeparateRouterLoss,
)

for part in MOE_PARTS:
    MODELS.register_module(module=part)
