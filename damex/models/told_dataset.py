"""Predict the dataset of an image, or restrict a detector to a given dataset.

Axes: B images, C classes, G dataset groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from mmdet.models.detectors import DINO, DeformableDETR
from torch import Tensor, nn

from damex.models.insertion import moe_blocks
from damex.models.label_prior import router_posterior


def can_tell_datasets(detector: Any) -> bool:
    """Whether a dataset head or routing loss taught a detector to tell datasets."""
    awareness = detector.awareness
    if awareness is not None and awareness.head is not None:
        return True
    return any(True for _ in _taught_blocks(detector))


def _taught_blocks(detector: Any) -> Iterator[Any]:
    """Yield blocks whose routers learned which experts serve which dataset group."""
    for block in moe_blocks(detector):
        is_taught = any(loss.needs_groups for loss in block.moe.losses)
        knows = is_taught and block.moe.group_experts_GE is not None
        if knows and not getattr(block, "is_dense", False):
            yield block


def group_posterior(detector: Any) -> Tensor:
    """Return a detector's probabilities (B, G) of the images' dataset groups.

    From the dataset head if it has one, else from its routers: each token's probability
    of a group, mean over the tokens of an image, then over layers. Call it within a
    step, after the forward pass; needs `can_tell_datasets`.
    """
    awareness = detector.awareness
    if awareness is not None and awareness.head is not None:
        return awareness.posterior()
    names = [block.name for block in _taught_blocks(detector)]
    records = detector.routing.records
    return torch.stack([router_posterior(records[name]) for name in names]).mean(0)


def choose_datasets(samples: Sequence[Any], posterior_BG: Tensor) -> None:
    """Restrict samples to the classes of their most probable dataset group.

    Reads ``labels_by_group``; writes ``annotated_labels`` and ``group_posterior``.
    """
    for sample, posterior in zip(samples, posterior_BG.tolist(), strict=True):
        best = max(range(len(posterior)), key=posterior.__getitem__)
        labels = sample.labels_by_group[best]
        sample.set_metainfo(dict(group_posterior=posterior, annotated_labels=labels))


@contextmanager
def told_dataset(detector: Any, labels: Sequence[int]) -> Iterator[bool]:
    """Restrict a detector in evaluation to some class labels and a dataset's experts.

    Other classes are masked wherever class scores are computed, in the selection of
    queries, too. If the gates support it, the samples' ``group_id`` chooses the experts
    instead of the router; the value yielded is whether they do.
    """
    layers = [block.moe for block in moe_blocks(detector)]
    before = [layer.group_choice for layer in layers]
    with ExitStack() as stack:
        for module in _classifiers(detector):
            hook = _ShutOut(labels, detector.bbox_head.num_classes)
            stack.enter_context(module.register_forward_hook(hook))
        try:
            for layer in layers:
                oracle = dataclasses.replace(layer.group_choice, oracle=True)
                layer.set_group_choice(oracle)
            is_forced = bool(layers)
        except ValueError:  # a gate or layer that cannot be restricted to a group
            is_forced = False
            _restore(layers, before)
        try:
            yield is_forced
        finally:
            _restore(layers, before)


def _restore(layers: Sequence[Any], choices: Sequence[Any]) -> None:
    for layer, choice in zip(layers, choices, strict=True):
        layer.group_choice = choice


def _classifiers(detector: Any) -> list[nn.Module]:
    """Return the modules that score classes: the head, and its branches if any."""
    head = detector.bbox_head
    branches = list(getattr(head, "cls_branches", ()))
    if selects_by_first_class(detector):
        branches.pop()
    return [*branches, head]


def selects_by_first_class(detector: Any) -> bool:
    """Whether queries are selected by the score of class 0, regardless of its meaning.

    True for two-stage Deformable DETR (Zhu et al. 2021), whose first stage separates
    objects from background.
    """
    is_deformable = isinstance(detector, DeformableDETR)
    is_staged = is_deformable and detector.as_two_stage
    return is_staged and not isinstance(detector, DINO)  # DINO scores all classes


class _ShutOut:
    """Forward hook that masks other class scores; a background after them is kept."""

    def __init__(self, labels: Sequence[int], num_classes: int) -> None:
        self._foreign = sorted(set(range(num_classes)) - set(labels))

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        """Set the scores of all other classes to minus infinity."""
        if isinstance(outputs, Tensor):
            return outputs.index_fill(-1, self._index(outputs), -torch.inf)
        return (self(module, inputs, outputs[0]), *outputs[1:])

    def _index(self, scores: Tensor) -> Tensor:
        return torch.tensor(self._foreign, dtype=torch.long, device=scores.device)
