"""Losses of a DETR: classes that they leave out, and how much an image weighs.

A query that no object is matched to learns that it shows none of the classes. That is
wrong where an object is in the image and is not labeled. Such classes are ignored:
their scores get no loss, and so no gradient; with a softmax over classes and
background, the query gets none. All losses of a head follow the rule:
those of the decoder layers, of the tokens that become queries, of the denoising
queries and of DDQ's dense ones. Matched queries, matching and the selection of queries
do not change.

A DETR divides its losses by the number of objects in the batch. All objects weigh
the same, so an image with one object counts little next to a crowded one.

Axes: B images, Q queries (R of all images), K ignored boxes, C classes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from mmdet.models.losses import DDQAuxLoss
from mmdet.structures.bbox import bbox_cxcywh_to_xyxy, bbox_overlaps
from mmdet.utils import reduce_mean
from torch import Tensor

from damex.models.queries import relative_boxes, selects_by_first_class

# Its sigmoid, focal loss and gradient are 0 in every floating type. float16 can
# represent it; minus infinity would turn 0 * inf into NaN.
IGNORED_LOGIT = -1e4
# COCO's evaluation forgives a detection in a crowd: intersection over its own area.
MIN_COVERED = 0.5


class IgnoredBoxes(NamedTuple):
    """Ignored boxes of an image: (K, 4) as x1 y1 x2 y2 relative to it, and labels."""

    boxes_K4: Tensor
    labels_K: Tensor


def ignored_boxes_of(samples: Sequence[Any]) -> list[IgnoredBoxes]:
    """Read the ``ignored_instances`` of mmdet's data samples: COCO's ``iscrowd``."""
    found = []
    for sample in samples:
        ignored = sample.get("ignored_instances")
        if ignored is None or "labels" not in ignored:
            labels_K = sample.gt_instances.labels[:0]
            found.append(IgnoredBoxes(labels_K.new_zeros(0, 4).float(), labels_K))
        else:
            boxes_K4 = relative_boxes(ignored.bboxes, sample.img_shape)
            found.append(IgnoredBoxes(boxes_K4, ignored.labels))
    return found


class _Block(NamedTuple):
    """The queries of one call of a classification loss.

    ``boxes`` maps an image to its (Q, 4), x1 y1 x2 y2 relative to it. With
    ``as_objects``, class 0 means all classes.
    """

    boxes: Mapping[int, Tensor]
    as_objects: bool = False


@contextmanager
def ignoring(
    detector: Any,
    samples: Sequence[Any],
    *,
    unannotated_BC: Tensor | None = None,
    above: float = 0.0,
) -> Iterator[None]:
    """Ignore classes of unmatched queries while a detector computes its losses.

    A class is ignored if the query's box lies in an ignored box of that class (with
    ``MIN_COVERED`` of its area), or if the image's dataset does not annotate the class
    and its probability is more than ``above``.
    """
    ignored = ignored_boxes_of(samples)
    if unannotated_BC is None and not any(len(one.labels_K) for one in ignored):
        yield
        return
    head = detector.bbox_head
    # The first stage of Deformable DETR has a loss after those of the layers.
    layers = head.num_pred_layer - 1 if selects_by_first_class(detector) else None
    rule = _Rule(ignored, unannotated_BC, above, head.num_classes)
    count = itertools.count()

    def see_matched(_: Any, boxes_BQ4: Sequence[Tensor], *__: Any) -> None:
        rule.expect(boxes_BQ4, as_objects=next(count) == layers)

    def see_denoising(_: Any, boxes_BQ4: Tensor, *__: Any, **___: Any) -> None:
        rule.expect([*boxes_BQ4])

    def see_dense(_: Any, boxes_BQ4: Tensor, *others: Any) -> None:
        rule.expect_each(boxes_BQ4, others[-1])

    dense = getattr(head, "aux_loss_for_dense", None)
    with ExitStack() as stack:
        _watch(stack, head, "get_targets", see_matched)
        stack.enter_context(head.loss_cls.register_forward_pre_hook(rule))
        if hasattr(head, "_loss_dn_single"):
            _watch(stack, head, "_loss_dn_single", see_denoising)
        if dense is not None:
            _watch(stack, dense, "loss", see_dense)
            stack.enter_context(dense.loss_cls.register_forward_pre_hook(rule))
        yield


def image_weights(counts_B: Tensor, power: float) -> Tensor:
    """Return the weights (B,) of the losses of images with some numbers of objects.

    They are ``count ** -power``, scaled so that all objects together weigh as much as
    without, over all processes: with 1 the loss is the mean of the losses that each
    image with objects would have alone. One without objects weighs as one with one.
    """
    weights_B = counts_B.clamp(min=1).float() ** -power
    both = torch.stack([counts_B.float().sum(), (counts_B * weights_B).sum()])
    objects, weighted = reduce_mean(both).clamp(min=torch.finfo(torch.float32).tiny)
    return weights_B * (objects / weighted)


@contextmanager
def balanced_images(
    detector: Any, samples: Sequence[Any], power: float
) -> Iterator[None]:
    """Weight the losses of images by :func:`image_weights` while they are computed.

    Those of all layers, of the tokens that become queries and of denoising; not of
    DDQ's dense queries, which have a head of their own.
    """
    if not power:
        yield
        return
    head, device = detector.bbox_head, detector.data_preprocessor.device
    counts = [len(sample.gt_instances) for sample in samples]
    weight_B = image_weights(torch.tensor(counts, device=device), power)

    def weigh(targets: tuple) -> tuple:
        labels, label_weights, boxes, box_weights, *numbers = targets
        for weights_BQ in (label_weights, box_weights):
            pairs = zip(weights_BQ, weight_B, strict=True)
            weights_BQ[:] = [weights_Q * weight for weights_Q, weight in pairs]
        return labels, label_weights, boxes, box_weights, *numbers

    with ExitStack() as stack:
        for name in ("get_targets", "get_dn_targets"):
            if hasattr(head, name):
                _wrap(stack, head, name, lambda call, *a, **k: weigh(call(*a, **k)))
        yield


class DenseQueryLoss(DDQAuxLoss):
    """DDQ's loss of dense queries in float32, for any number of objects.

    mmdet's mixes types under autocast, and matches nothing where an image has more
    objects than there are dense queries. Here those that come last are left out.
    """

    def loss(
        self,
        cls_scores: Tensor,
        bbox_preds: Tensor,
        gt_bboxes: Sequence[Tensor],
        gt_labels: Sequence[Tensor],
        *others: Any,
    ) -> dict:
        """Compute the losses as mmdet does."""
        count = cls_scores.shape[1]
        boxes = [boxes_N4[:count] for boxes_N4 in gt_bboxes]
        labels = [labels_N[:count] for labels_N in gt_labels]
        scores_BQC, boxes_BQ4 = cls_scores.float(), bbox_preds.float()
        return super().loss(scores_BQC, boxes_BQ4, boxes, labels, *others)


def _watch(stack: ExitStack, owner: Any, name: str, see: Callable[..., None]) -> None:
    """Show the arguments of a method to a function, until the stack is closed."""

    def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        see(*args, **kwargs)
        return method(*args, **kwargs)

    _wrap(stack, owner, name, call)


def _wrap(stack: ExitStack, owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Give a method and its arguments to a function, until the stack is closed."""
    method, own = getattr(owner, name), vars(owner).get(name)
    setattr(owner, name, partial(call, method))
    stack.callback(*((setattr, owner, name, own) if own else (delattr, owner, name)))


class _Rule:
    """Masks scores before a classification loss; `expect` announces its queries."""

    def __init__(
        self,
        ignored: Sequence[IgnoredBoxes],
        unannotated_BC: Tensor | None,
        above: float,
        num_classes: int,
    ) -> None:
        self._ignored, self._above, self._classes = ignored, above, num_classes
        self._unannotated_BC = unannotated_BC
        self._blocks: deque[_Block] = deque()

    def expect(self, boxes_BQ4: Sequence[Tensor], *, as_objects: bool = False) -> None:
        """Announce queries of all images: centre and size, relative."""
        boxes = {
            image: bbox_cxcywh_to_xyxy(boxes_Q4.detach())
            for image, boxes_Q4 in enumerate(boxes_BQ4)
        }
        if any(map(len, boxes.values())):  # otherwise no loss is called
            self._blocks.append(_Block(boxes, as_objects))

    def expect_each(self, boxes_BQ4: Tensor, metas: Sequence[Any]) -> None:
        """Announce queries image by image: corners in pixels."""
        rows = zip(boxes_BQ4.detach(), metas, strict=True)
        for image, (boxes_Q4, meta) in enumerate(rows):
            relative_Q4 = relative_boxes(boxes_Q4, meta["img_shape"])
            self._blocks.append(_Block({image: relative_Q4}))

    def __call__(self, loss: Any, inputs: tuple) -> tuple:
        """Return the inputs of a loss: scores, targets and weights of rows.

        Scores that are ignored are masked; with a softmax, the whole row is.
        """
        scores_RC, target, *others = inputs
        block = self._blocks.popleft()
        labels_R = target[0] if isinstance(target, tuple) else target
        unmatched_R = labels_R >= self._classes
        mask_RC = torch.zeros_like(scores_RC, dtype=torch.bool)
        mask_RC[:, : self._classes] = self._in_ignored_boxes(block)
        if self._unannotated_BC is not None:
            mask_RC[:, : self._classes] |= self._found(loss, scores_RC, block)
        mask_RC &= unmatched_R.unsqueeze(1)
        if not getattr(loss, "use_sigmoid", False):
            # The background would take the probability of a class that is left out.
            weight_R = others[0] if others else scores_RC.new_ones(len(scores_RC))
            return scores_RC, target, weight_R.masked_fill(mask_RC.any(1), 0.0)
        ignored = 0.0 if getattr(loss, "activated", False) else IGNORED_LOGIT
        return scores_RC.masked_fill(mask_RC, ignored), target, *others

    def _in_ignored_boxes(self, block: _Block) -> Tensor:
        """Whether a query lies in an ignored box of a class (R, C)."""
        masks = []
        for image, boxes_Q4 in block.boxes.items():
            mask_QC = boxes_Q4.new_zeros(len(boxes_Q4), self._classes)
            boxes_K4, labels_K = self._ignored[image]
            if len(labels_K):
                covered_QK = bbox_overlaps(boxes_Q4, boxes_K4, mode="iof")
                lies_in_QK = (covered_QK > MIN_COVERED).to(mask_QC.dtype)
                classes_K = torch.zeros_like(labels_K) if block.as_objects else labels_K
                mask_QC.index_add_(1, classes_K, lies_in_QK)
            masks.append(mask_QC > 0)
        return torch.cat(masks)

    def _found(self, loss: Any, scores_RC: Tensor, block: _Block) -> Tensor:
        """Whether a query may show a class that is not annotated (R, C)."""
        assert self._unannotated_BC is not None
        rows = []
        for image, boxes_Q4 in block.boxes.items():
            row_C = self._unannotated_BC[image]
            if block.as_objects:
                row_C = torch.ones_like(row_C).cumsum(0).eq(1) & row_C.any()
            rows.append(row_C.expand(len(boxes_Q4), -1))
        probs_RC = scores_RC.detach()
        if not getattr(loss, "activated", False):
            sigmoid = getattr(loss, "use_sigmoid", False)
            probs_RC = probs_RC.sigmoid() if sigmoid else probs_RC.softmax(-1)
        return torch.cat(rows) & (probs_RC[:, : self._classes] > self._above)
