"""What has to hold exactly: the choice of patches and the router's closed form.

Axes: B samples, N patches of a sample, D pixels of a patch, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from damex.studies.pmoe2023.digits import DigitSource
from damex.studies.pmoe2023.jobs import Task
from damex.studies.pmoe2023.models import PatchMoE
from damex.studies.pmoe2023.plan import JOINT, SEPARATE
from damex.studies.pmoe2023.training import BATCH_SIZE, train_router

__all__ = ["closed_form_error", "selection_errors"]

LR, EPOCHS, NUM_SAMPLES = 0.2, 100, 300


@torch.no_grad()
def selection_errors(source: DigitSource, seed: int) -> tuple[int, float]:
    """Looks at what each expert of joint pMoE takes from each sample.

    Args:
        source: Pictures.
        seed: Of samples and router.

    Returns:
        How many experts took another number than l from a sample, and how far the sum
        of an expert's gating values over a sample is from 1 at most.
    """
    samples = Task().test(source, NUM_SAMPLES, seed)
    torch.manual_seed(seed)
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

    Args:
        source: Pictures.
        seed: Of samples and router.
    """
    samples = Task().train(source, NUM_SAMPLES, seed)
    torch.manual_seed(seed)
    model = PatchMoE(SEPARATE, embed_dims=samples.patches_BND.shape[2])
    weight_ED = model.router_weight_ED
    start_ED = weight_ED.detach().clone()
    train_router(model, samples, lr=LR, epochs=EPOCHS)
    sign_B = 1.0 - 2.0 * samples.labels_B  # class 0 is y = +1
    mean_D: Tensor = (sign_B[:, None] * samples.patches_BND.sum(1)).mean(0)
    steps = EPOCHS * NUM_SAMPLES / BATCH_SIZE
    expected_ED = start_ED + LR * steps * torch.stack([mean_D, -mean_D])
    return ((weight_ED - expected_ED).norm() / expected_ED.norm()).item()
