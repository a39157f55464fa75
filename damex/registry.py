"""Importing this module adds all classes of damex to mmdet's registries.

``damex.moe`` and the torch-only modules of ``damex.papers`` do not depend on a
registry, so their classes are registered here.
"""

from __future__ import annotations

from mmdet.registry import MODELS

# engine first: it imports mmdet silently
from damex import engine, evaluation, hf, moe  # noqa: F401
from damex.datasets import coco, mixture, sampler  # noqa: F401
from damex.engine import console, optim, runner, summary  # noqa: F401
from damex.engine.checkpoint import load_checkpoints_as_data
from damex.models import detectors  # noqa: F401
from damex.papers import (  # noqa: F401
    channel_gating,
    channels,
    dense_gates,
    expert_choice,
    patch_convs,
    patches,
    phases,
)
from damex.workbench.check import hook  # noqa: F401
from damex.workbench.formats import conversion  # noqa: F401 - readers of root=

for part in (
    moe.LinearRouter,
    moe.MLPRouter,
    moe.CosineRouter,
    moe.HierarchicalRouter,
    moe.TopKGate,
    moe.BiasBalancer,
    moe.ExpertCapacity,
    moe.FFNExperts,
    moe.LowRankExperts,
    moe.SharedExpert,
    moe.DatasetRoutingLoss,
    moe.LoadBalanceLoss,
    moe.ImportanceLoss,
    moe.LoadLoss,
    moe.RouterZLoss,
    moe.SeparateRouterLoss,
    dense_gates.DenseSoftmaxGate,
    dense_gates.DenseToSparseGate,
    expert_choice.ExpertChoiceGate,
    patches.PatchConvExperts,
    channels.ShallowEmbedding,
):
    MODELS.register_module(module=part)

load_checkpoints_as_data()
