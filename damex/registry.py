"""Importing this module adds all classes of damex to mmdet's registries.

``damex.moe`` does not depend on a registry, so its classes are registered here.
"""

from __future__ import annotations

from mmdet.registry import MODELS

# engine first: it imports mmdet silently
from damex import engine, evaluation, moe  # noqa: F401
from damex.curation import hook  # noqa: F401
from damex.datasets import coco, mixture, sampler  # noqa: F401
from damex.engine import console, optim, runner, summary  # noqa: F401
from damex.engine.checkpoint import load_checkpoints_as_data
from damex.models import detectors  # noqa: F401

for part in (
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
    moe.LowRankExperts,
    moe.AffineExperts,
    moe.PatchConvExperts,
    moe.SharedExpert,
    moe.ShallowEmbedding,
    moe.DatasetRoutingLoss,
    moe.LoadBalanceLoss,
    moe.ImportanceLoss,
    moe.LoadLoss,
    moe.RouterZLoss,
    moe.SeparateRouterLoss,
):
    MODELS.register_module(module=part)

load_checkpoints_as_data()
