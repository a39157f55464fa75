"""The compute of table 1, counted while the models run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from damex.studies.pmoe2023.models import PatchCNN, PatchMoE, Recipe
from damex.studies.pmoe2023.patch_data import NUM_PATCHES

__all__ = ["StepCompute", "cnn_compute", "pmoe_compute"]


@dataclass(frozen=True)
class StepCompute:
    """Multiply-adds for one sample, in units of the pixels of a patch.

    In these units table 1 reads: CNN m*n, experts m*l, forward and backward; router k*n
    forward and k*l^2 backward. What the fixed second layer costs is counted with the
    first; it is less than one part in as many as a patch has pixels.

    Attributes:
        forward: Of the forward pass.
        backward: Of the backward pass.
    """

    forward: float
    backward: float


def pmoe_compute(recipe: Recipe, *, embed_dims: int) -> tuple[StepCompute, StepCompute]:
    """Counts router and experts of pMoE.

    Args:
        recipe: Sizes.
        embed_dims: Pixels of a patch.

    Returns:
        Of the router, and of the experts.
    """
    moe = PatchMoE(recipe, embed_dims=embed_dims).moe
    patches_1ND = torch.rand(1, NUM_PATCHES, embed_dims)
    assignment = moe.route(patches_1ND).assignment
    rows_RD = assignment.dispatch(patches_1ND[0])
    router = _count(lambda: moe.router(patches_1ND[0]), embed_dims)
    experts = _count(lambda: moe.experts(rows_RD, assignment.counts_E), embed_dims)
    return router, experts


def cnn_compute(num_filters: int, *, embed_dims: int) -> StepCompute:
    """Counts the CNN.

    Args:
        num_filters: m.
        embed_dims: Pixels of a patch.
    """
    model = PatchCNN(num_filters, embed_dims=embed_dims)
    patches_1ND = torch.rand(1, NUM_PATCHES, embed_dims)
    return _count(lambda: model(patches_1ND), embed_dims)


def _count(forward: Callable[[], Tensor], embed_dims: int) -> StepCompute:
    counts = []
    with FlopCounterMode(display=False) as counter:
        out = forward()
    counts.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    counts.append(counter.get_total_flops())
    # torch counts a multiply-add as two
    return StepCompute(*(count / 2 / embed_dims for count in counts))
