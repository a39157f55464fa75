"""Identities that hold for any weights: patches, eq. 6 and table 1.

Axes: B samples, N patches of a sample, D pixels of a patch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from studies.digits import DigitSource
from studies.harness import seeded
from studies.pmoe2023.data import GRID, NUM_PATCHES, Task
from studies.pmoe2023.models import (
    PatchCNN,
    PatchMoE,
    Recipe,
    WideResNet,
    last_layer_parameters,
)
from studies.pmoe2023.plan import CNN, JOINT, SEPARATE
from studies.pmoe2023.training import BATCH_SIZE, train_router
from studies.report import Row, checked, near

LR, EPOCHS, NUM_SAMPLES = 0.2, 100, 300


def exact_rows(source: DigitSource, seeds: Sequence[int]) -> list[Row]:
    """The choice of patches, the router's closed form, compute and parameters."""
    wrong, off = zip(*(selection_errors(source, seed) for seed in seeds), strict=True)
    far = [closed_form_error(source, seed) for seed in seeds]
    selection = "experts that took another number of patches than l"
    rows = [checked(selection, wrong, "= 0", near(0, 0), published="0", digits=0)]
    rows += [
        checked(name, errors, "< 1e-5", lambda x: x < 1e-5, published="0", digits=8)
        for name, errors in (
            ("gating values of an expert: their sum minus 1", off),
            ("separate router: relative distance from eq. 6", far),
        )
    ]
    embed_dims = source.train.images_S1HW[0].numel()
    for label, recipe in (("separate", SEPARATE), ("joint", JOINT)):
        rows += _compute_rows(f"{label}, l = {recipe.num_tokens}", recipe, embed_dims)
    side = GRID * source.train.images_S1HW.shape[2]
    (plain, _), (experts, router) = (
        last_layer_parameters(WideResNet(side=side, num_classes=2, experts=moe))
        for moe in (False, True)
    )
    name = "WRN: parameters of all experts minus those of the convolution"
    where = f"and {router} of the router"
    more = [experts - plain]
    rows.append(checked(name, more, "= 0", near(0, 0), where, published="0", digits=0))
    return rows


def _compute_rows(where: str, recipe: Recipe, embed_dims: int) -> Iterator[Row]:
    cnn = cnn_compute(CNN.num_filters, embed_dims=embed_dims)
    router, experts = pmoe_compute(recipe, embed_dims=embed_dims)
    share = recipe.num_tokens / NUM_PATCHES
    # The fixed second layer is more than table 1 counts.
    slack = 1 + 1 / embed_dims
    for way, value in (
        ("forward", experts.forward / cnn.forward),
        ("backward", experts.backward / cnn.backward),
    ):
        yield Row(
            f"compute of the experts, {way}, of the CNN's",
            f"l/n = {share:g}",
            [value],
            "within the second layer's part",
            share / slack <= value <= share * slack,
            where,
        )
    yield Row(
        "compute of the router, backward, of its forward",
        f"O(l^2/n) = {recipe.num_tokens**2 / NUM_PATCHES:g}",
        [router.backward / router.forward],
        settings=where,
    )


@torch.no_grad()
def selection_errors(source: DigitSource, seed: int) -> tuple[int, float]:
    """Look at what each expert of joint pMoE takes from each sample.

    Returns how many experts took another number than l from a sample, and how far the
    sum of an expert's gating values over a sample is from 1 at most.
    """
    samples = Task().test(source, NUM_SAMPLES, seed)
    with seeded(seed):
        model = PatchMoE(JOINT, embed_dims=samples.patches_BND.shape[2])
    model.router_weight_ED.mul_(1e4)  # so that gating values differ
    _, record = model.forward_with_record(samples.patches_BND)
    routes = record.assignment
    sample_R = routes.token_index_R // samples.patches_BND.shape[1]
    cell_R = sample_R * JOINT.num_experts + routes.expert_index_R
    cells = len(samples) * JOINT.num_experts
    counts = cell_R.bincount(minlength=cells)
    sums = torch.zeros(cells).index_add(0, cell_R, routes.weight_R)
    wrong = int((counts != JOINT.num_tokens).sum())
    return wrong, (sums - 1).abs().max().item()


def closed_form_error(source: DigitSource, seed: int) -> float:
    """How far a trained router is from what minimises eq. 6, relative to its length.

    The gradient of eq. 6 is constant: T steps with learning rate eta move w1 by
    eta * T * mean_i(y_i sum_j x_ij), and w2 by the opposite.
    """
    samples = Task().train(source, NUM_SAMPLES, seed)
    with seeded(seed):
        model = PatchMoE(SEPARATE, embed_dims=samples.patches_BND.shape[2])
    weight_ED = model.router_weight_ED
    start_ED = weight_ED.detach().clone()
    train_router(model, samples, lr=LR, epochs=EPOCHS)
    sign_B = 1.0 - 2.0 * samples.labels_B  # class 0 is y = +1
    mean_D: Tensor = (sign_B[:, None] * samples.patches_BND.sum(1)).mean(0)
    steps = EPOCHS * NUM_SAMPLES / BATCH_SIZE
    expected_ED = start_ED + LR * steps * torch.stack([mean_D, -mean_D])
    return ((weight_ED - expected_ED).norm() / expected_ED.norm()).item()


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
    """Count router and experts of pMoE, in this order."""
    moe = PatchMoE(recipe, embed_dims=embed_dims).moe
    patches_1ND = torch.rand(1, NUM_PATCHES, embed_dims)
    assignment = moe.route(patches_1ND).assignment
    rows_RD = assignment.dispatch(patches_1ND[0])
    router = _count(lambda: moe.router(patches_1ND[0]), embed_dims)
    experts = _count(lambda: moe.experts(rows_RD, assignment.counts_E), embed_dims)
    return router, experts


def cnn_compute(num_filters: int, *, embed_dims: int) -> StepCompute:
    """Count the CNN."""
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
