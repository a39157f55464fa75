"""Dataset classifiers, and the effect of their answer on class scores.

The head is zero-initialized and draws no random numbers, so the other weights start the
same with and without it.

Axes: B images, N tokens (padding included), V real tokens, D channels, C classes, S
datasets, G dataset groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.models.detection_losses import IGNORED_LOGIT
from damex.models.insertion import moe_blocks
from damex.models.queries import selects_by_first_class
from damex.moe import RoutingRecord


class DatasetHead(nn.Module):
    """Linear classifier of dataset groups on the mean of an image's features.

    It learns what DAMEX's routing loss teaches a router, for detectors without routers.
    """

    def __init__(self, embed_dims: int, num_groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_groups, embed_dims))
        self.bias = nn.Parameter(torch.zeros(num_groups))

    def forward(self, memory_BND: Tensor, padding_BN: Tensor | None) -> Tensor:
        """Return float32 logits (B, G), even under autocast; True marks padding."""
        with torch.autocast(memory_BND.device.type, enabled=False):
            memory_BND = memory_BND.to(self.weight.dtype)
            if padding_BN is None:
                mean_BD = memory_BND.mean(dim=1)
            else:
                real_BN1 = (~padding_BN).unsqueeze(2).to(memory_BND.dtype)
                mean_BD = (memory_BND * real_BN1).sum(dim=1) / real_BN1.sum(dim=1)
            return functional.linear(mean_BD, self.weight, self.bias)


def dataset_loss(logits_BG: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy and the accuracy of dataset logits.

    Both are means over images of a known group (not -1); 0 without any.
    """
    count = (group_ids_B >= 0).sum().clamp_min(1)
    total = functional.cross_entropy(
        logits_BG, group_ids_B, ignore_index=-1, reduction="sum"
    )
    hits = (logits_BG.argmax(dim=1) == group_ids_B).sum()
    return total / count, hits / count


def router_posterior(record: RoutingRecord) -> Tensor:
    """Return a router's mean probabilities of the dataset groups, float32 (B, G).

    A token's probability of a group is the sum over the group's experts, normalized if
    groups share experts; the mean is over an image's real tokens. The layer must have a
    map of dataset groups.
    """
    assert record.group_experts_GE is not None
    with torch.autocast(record.probs_VE.device.type, enabled=False):
        probs_VG = record.probs_VE @ record.group_experts_GE.T.to(record.probs_VE.dtype)
    # Experts of no group may take all probability; the group is then unknown.
    probs_VG = probs_VG.clamp_min(torch.finfo(probs_VG.dtype).tiny)
    probs_VG = probs_VG / probs_VG.sum(dim=-1, keepdim=True)
    sums_BG = record.packing.unpack(probs_VG).sum(dim=1)
    return sums_BG / sums_BG.sum(dim=1, keepdim=True)


def annotated_classes(
    labels: Sequence[Sequence[int]], groups: Sequence[int], *, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return masks (S, C) and (G, C) of the classes of datasets and of groups.

    ``labels`` are the annotated labels of each dataset and ``groups`` its group number.
    A group annotates the classes of all its datasets.
    """
    annotated_SC = torch.zeros(len(labels), num_classes, dtype=torch.bool)
    annotated_GC = torch.zeros(max(groups) + 1, num_classes, dtype=torch.bool)
    for dataset, (group, known) in enumerate(zip(groups, labels, strict=True)):
        annotated_SC[dataset, list(known)] = True
        annotated_GC[group, list(known)] = True
    return annotated_SC, annotated_GC


def ignore_unannotated(
    logits: Tensor, dataset_ids_B: Tensor, annotated_SC: Tensor
) -> Tensor:
    """Remove classes that an image's dataset does not annotate from its training.

    From the loss, the matching and the selection of queries: the dataset-aware focal
    loss of Yao et al. (2020, arXiv 2001.04621), applied to logits (..., B, queries, C).
    Nothing is removed from images of an unknown dataset, -1.
    """
    unannotated_BC = unannotated_classes(dataset_ids_B, annotated_SC)
    return logits.masked_fill(unannotated_BC.unsqueeze(1), IGNORED_LOGIT)


def unannotated_classes(dataset_ids_B: Tensor, annotated_SC: Tensor) -> Tensor:
    """Return which classes (B, C) an image's dataset, if known, does not annotate."""
    unannotated_BC = ~annotated_SC[dataset_ids_B.clamp(min=0)]
    return unannotated_BC & (dataset_ids_B >= 0).unsqueeze(1)


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


@contextmanager
def class_scores(
    modules: Iterable[nn.Module], change: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Change the class scores that modules return, alone or first of several."""

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return change(outputs)
        return (change(outputs[0]), *outputs[1:])

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(hook))
        yield


def classifies_datasets(detector: Any) -> bool:
    """Whether a detector has a dataset head, or routers trained to be one."""
    return _has_head(detector) or bool(_trained_routers(detector))


def _has_head(detector: Any) -> bool:
    return detector.awareness is not None and detector.awareness.head is not None


def _trained_routers(detector: Any) -> list[str]:
    """Return the names of blocks whose routers a loss trains to classify datasets."""
    return [
        block.name
        for block in moe_blocks(detector)
        if any(loss.needs_groups for loss in block.moe.losses)
        and block.moe.group_experts_GE is not None
        and not getattr(block, "is_dense", False)
    ]


def group_posterior(detector: Any) -> Tensor:
    """Return a detector's probabilities (B, G) of the images' dataset groups.

    From the dataset head if it has one, else from its routers: each token's probability
    of a group, mean over the tokens of an image, then over layers. Call it within a
    step, after the forward pass; needs :func:`classifies_datasets`.
    """
    if _has_head(detector):
        return detector.awareness.posterior()
    records = detector.routing.records
    posteriors = [router_posterior(records[n]) for n in _trained_routers(detector)]
    return torch.stack(posteriors).mean(0)


def restrict_to_predicted_group(samples: Sequence[Any], detector: Any) -> None:
    """Restrict samples to the classes of the dataset group that a detector predicts.

    It is the group whose experts the last layer uses, if the tokens of an image voted
    for one, else the most probable group. Reads ``labels_by_group``; writes
    ``annotated_labels``, ``predicted_group`` and ``group_posterior``.
    """
    posterior_BG = group_posterior(detector)
    votes_BG = None if _has_head(detector) else detector.routing.votes_BG
    group_B = (posterior_BG if votes_BG is None else votes_BG).argmax(1)
    rows = zip(samples, posterior_BG.tolist(), group_B.tolist(), strict=True)
    for sample, posterior, group in rows:
        known = dict(group_posterior=posterior, predicted_group=group)
        labels = sample.labels_by_group[group]
        sample.set_metainfo(dict(known, annotated_labels=labels))


@contextmanager
def condition_on_dataset(detector: Any, labels: Sequence[int]) -> Iterator[None]:
    """Restrict a detector in evaluation to a given dataset's classes and experts.

    Classes other than ``labels`` are masked wherever class scores are computed, in the
    selection of queries, too; a background after them is kept. A ``label_prior`` is
    off. If the gates support it, the samples' ``group_id`` chooses the experts instead
    of the router. Other forward passes have to wait meanwhile.
    """
    head = detector.bbox_head
    # Branches that select queries by class 0, any object, may be those of all layers.
    is_staged = selects_by_first_class(detector)
    modules = [*(() if is_staged else getattr(head, "cls_branches", ())), head]
    foreign = torch.ones(head.num_classes, dtype=torch.bool)
    foreign[list(labels)] = False

    def mask(scores: Tensor) -> Tensor:
        index = foreign.nonzero().flatten().to(scores.device)
        return scores.index_fill(-1, index, -torch.inf)

    with class_scores(modules, mask), ExitStack() as prior, ExitStack() as stack:
        if detector.awareness is not None:  # its prior is of a predicted dataset
            detector.awareness.is_told = True
            prior.callback(setattr, detector.awareness, "is_told", False)
        try:
            for layer in (block.moe for block in moe_blocks(detector)):
                choice = layer.group_choice
                stack.callback(setattr, layer, "group_choice", choice)
                layer.set_group_choice(dataclasses.replace(choice, oracle=True))
        except ValueError:  # a gate or layer that cannot be restricted to a group
            stack.close()
        yield
