"""Whether the class-discriminative patch comes to the right expert (figures 8 and 9).

Axes: B samples, N patches of a sample, T = B*N, E experts, G classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from damex.moe import ExpertChoiceGate
from damex.studies.pmoe2023.models import PatchMoE
from damex.studies.pmoe2023.patch_data import PatchSamples

__all__ = ["largest_hits", "taken_hits", "top_hits"]


def top_hits(model: PatchMoE, samples: PatchSamples, num_tokens: int) -> float:
    """Figure 8: share of samples whose class's expert would take the patch, in percent.

    Args:
        model: With one expert per class.
        samples: Test samples.
        num_tokens: l, how many patches the expert may take.
    """
    taken_BE = _discriminative_taken(model, samples, num_tokens)
    own_B = taken_BE.gather(1, samples.labels_B.unsqueeze(1))
    return 100 * own_B.double().mean().item()


def largest_hits(model: PatchMoE, samples: PatchSamples) -> tuple[float, ...]:
    """Figure 9: how often the patch has the largest gating value of one expert.

    Args:
        model: Any pMoE.
        samples: Test samples.

    Returns:
        For each class the percentage of its samples, for its best expert.
    """
    return _best_expert(_discriminative_taken(model, samples, 1), samples)


def taken_hits(model: PatchMoE, samples: PatchSamples) -> tuple[float, ...]:
    """How often one expert takes the patch at all, with whatever gating value.

    Args:
        model: Any pMoE.
        samples: Test samples.

    Returns:
        As `largest_hits`.
    """
    num_tokens = model.recipe.num_tokens
    return _best_expert(_discriminative_taken(model, samples, num_tokens), samples)


def _best_expert(taken_BE: Tensor, samples: PatchSamples) -> tuple[float, ...]:
    """By class, percentage of samples of the expert that has most of them."""
    return tuple(
        100 * taken_BE[samples.labels_B == label].double().mean(0).max().item()
        for label in samples.labels_B.unique().tolist()
    )


@torch.no_grad()
def _discriminative_taken(
    model: PatchMoE, samples: PatchSamples, num_tokens: int
) -> Tensor:
    """Whether each expert has the discriminative patch among its first few."""
    _, record = model.forward_with_record(samples.patches_BND)
    num_samples, num_patches, _ = samples.patches_BND.shape
    logits_BNE = record.logits_TE.unflatten(0, (num_samples, num_patches))
    assignment = ExpertChoiceGate(num_tokens=num_tokens)(logits_BNE)
    taken_TE = torch.zeros_like(record.logits_TE, dtype=torch.bool)
    taken_TE[assignment.token_index_R, assignment.expert_index_R] = True
    patch_B = torch.arange(num_samples) * num_patches + samples.position_B
    return taken_TE[patch_B]
