"""From the predicted dataset of an image to its classes: a mask and a prior.

Axes: B images, C classes, S datasets, G dataset groups, V tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from damex.moe import RoutingRecord

# Its sigmoid, focal loss and gradient are 0 in every floating type. float16 can
# represent it; minus infinity would turn 0 * inf into NaN.
IGNORED_LOGIT = -1e4


@dataclass(frozen=True)
class LabelCoverage:
    """Which classes the datasets of a mixture annotate.

    Attributes:
        labels: Annotated labels of each dataset.
        groups: Group number of each dataset.
    """

    labels: Sequence[Sequence[int]]
    groups: Sequence[int]

    @property
    def num_groups(self) -> int:
        """G."""
        return max(self.groups) + 1

    def by_dataset(self, num_classes: int) -> Tensor:
        """Return a bool tensor (S, C), True where a dataset annotates a class."""
        annotated_SC = torch.zeros(len(self.labels), num_classes, dtype=torch.bool)
        for annotated_C, labels in zip(annotated_SC, self.labels, strict=True):
            annotated_C[list(labels)] = True
        return annotated_SC

    def by_group(self, num_classes: int) -> Tensor:
        """Return a bool tensor (G, C), True where any dataset of a group annotates."""
        annotated_GC = torch.zeros(self.num_groups, num_classes, dtype=torch.bool)
        for group, labels in zip(self.groups, self.labels, strict=True):
            annotated_GC[group, list(labels)] = True
        return annotated_GC


def unannotated_classes(dataset_ids_B: Tensor, annotated_SC: Tensor) -> Tensor:
    """Return a mask (B, C) of the classes that an image's dataset does not annotate.

    Dataset ids are -1 where unknown, which masks nothing.
    """
    known_B1 = (dataset_ids_B >= 0).unsqueeze(1)
    return ~annotated_SC[dataset_ids_B.clamp(min=0)] & known_B1


def ignore_classes(logits: Tensor, unannotated_BC: Tensor) -> Tensor:
    """Remove classes from the loss, the matching and the selection of queries.

    The dataset-aware focal loss of Yao et al. (2020, arXiv 2001.04621), applied to
    logits (..., B, queries, C).
    """
    return logits.masked_fill(unannotated_BC.unsqueeze(1), IGNORED_LOGIT)


def class_log_prior(
    posterior_BG: Tensor, annotated_GC: Tensor, *, floor: float
) -> Tensor:
    """Return the log probability (B, C) that an image's dataset annotates a class.

    ``floor`` is the minimum probability of a class; 0 excludes classes entirely.
    Classes that all groups annotate get exactly 0.
    """
    prior_BC = posterior_BG @ annotated_GC.to(posterior_BG.dtype)
    prior_BC = prior_BC.clamp(min=floor, max=1.0)  # sums of floats may exceed 1
    # Exact if every group annotates the class, despite rounding of the sum.
    return prior_BC.log().masked_fill(annotated_GC.all(dim=0), 0.0)


def router_posterior(record: RoutingRecord) -> Tensor:
    """Return a router's mean probabilities of the dataset groups, float32 (B, G).

    A token's probability of a group is the sum over the group's experts, normalized if
    groups share experts; the mean is over an image's real tokens.

    Raises:
        ValueError: If the layer has no map of dataset groups.
    """
    if record.group_experts_GE is None:
        raise ValueError("router_posterior: the layer has no map of dataset groups")
    probs_VG = record.probs_VE @ record.group_experts_GE.T.to(record.probs_VE.dtype)
    # Experts of no group may take all probability; the group is then unknown.
    probs_VG = probs_VG.clamp_min(torch.finfo(probs_VG.dtype).tiny)
    probs_VG = probs_VG / probs_VG.sum(dim=1, keepdim=True)
    sums_BG = record.packing.unpack(probs_VG).sum(dim=1)
    return sums_BG / sums_BG.sum(dim=1, keepdim=True)
