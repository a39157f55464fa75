"""Importing this module adds all classes of damex to mmdet's registries.

``damex.moe`` does not depend on a registry, so its classes are registered here.
"""

from __future__ import annotations

from mmdet.registry import MODELS

# engine first: it imports mmdet silently
from damex import engine, evaluation  # noqa: F401
from damex.datasets import coco, mixture, sampler  # noqa: F401
from damex.engine import console, optim, runner, summary  # noqa: F401
from damex.engine.checkpoint import load_checkpoints_as_data
from damex.models import detectors  # noqa: F401
from damex.moe import (
    AffineExperts,
    BiasBalancer,
    CosineRouter,
    DatasetRoutingLoss,
    ExpertCapacity,
    FFNExperts,
    HierarchicalRouter,
    ImportanceLoss,
    LinearRouter,
    LoadBalanceLoss,
    LoadLoss,
    LowRankExperts,
    MLPRouter,
    RouterZLoss,
    SeparateRouterLoss,
    SharedExpert,
    TopKGate,
)
from damex.papers import channel_gating, patch_convs, phases  # noqa: F401
from damex.papers.channels import ShallowEmbedding
from damex.papers.dense_gates import DenseSoftmaxGate, DenseToSparseGate
from damex.papers.expert_choice import ExpertChoiceGate
from damex.papers.patches import PatchConvExperts
from damex.workbench.check import hook  # noqa: F401
from damex.workbench.formats import conversion  # noqa: F401 - readers of root=

for part in (
    LinearRouter,
    MLPRouter,
    CosineRouter,
    HierarchicalRouter,
    TopKGate,
    DenseSoftmaxGate,
    DenseToSparseGate,
    ExpertChoiceGate,
    BiasBalancer,
    ExpertCapacity,
    FFNExperts,
    LowRankExperts,
    AffineExperts,
    PatchConvExperts,
    SharedExpert,
    ShallowEmbedding,
    DatasetRoutingLoss,
    LoadBalanceLoss,
    ImportanceLoss,
    LoadLoss,
    RouterZLoss,
    SeparateRouterLoss,
):
    MODELS.register_module(module=part)

load_checkpoints_as_data()
