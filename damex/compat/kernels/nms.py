"""Non-maximum suppression, hard (torchvision) and soft (arXiv 1704.04503)."""

from __future__ import annotations

import torch
from torch import Tensor

NAIVE, LINEAR = 0, 1


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Returns the kept boxes, best first.

    Args:
        boxes: x1, y1, x2, y2, ``(boxes, 4)``.
        scores: ``(boxes,)``.
        iou_threshold: A box goes if it overlaps a better one by more than this.
        offset: 1 if x2 and y2 are the last pixel of a box, 0 if they are its edge.

    Returns:
        Indices into ``boxes``, ``(kept,)``.
    """
    from torchvision.ops import nms as torchvision_nms

    dtype = torch.promote_types(boxes.dtype, torch.float32)
    return torchvision_nms(
        _with_edges(boxes.to(dtype), offset), scores.to(dtype), iou_threshold
    )


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Lowers the scores of overlapping boxes instead of dropping the boxes.

    Args:
        boxes: x1, y1, x2, y2, ``(boxes, 4)``.
        scores: ``(boxes,)``.
        dets: The first rows are filled with box and new score, best first,
            ``(boxes, 5)``.
        iou_threshold: Overlap from which the naive and linear methods act.
        sigma: Width of the Gaussian method.
        min_score: A box whose lowered score is below this goes.
        method: 0 naive, 1 linear, 2 Gaussian.
        offset: As in ``nms``.

    Returns:
        Indices into ``boxes`` of the filled rows, ``(kept,)``.
    """
    from torchvision.ops import box_iou

    edges = _with_edges(boxes, offset)
    left = torch.arange(len(boxes))
    current = scores.clone()
    kept: list[int] = []
    while len(left):
        best = int(left[current[left].argmax()])
        dets[len(kept)] = torch.cat((boxes[best], current[best, None]))
        kept.append(best)
        left = left[left != best]
        overlap = box_iou(edges[best, None], edges[left])[0]
        current[left] *= _keep_share(overlap, iou_threshold, sigma, method)
        left = left[current[left] >= min_score]
    return torch.tensor(kept, dtype=torch.long)


def _keep_share(
    overlap: Tensor, iou_threshold: float, sigma: float, method: int
) -> Tensor:
    """Returns the factor on the score of each box that overlaps a better one."""
    # Boxes without area overlap by 0 / 0: not a number, and not above a threshold.
    if method == NAIVE:
        return torch.where(overlap >= iou_threshold, 0, torch.ones_like(overlap))
    if method == LINEAR:
        return torch.where(overlap >= iou_threshold, 1 - overlap, 1)
    return torch.exp(-overlap.square() / sigma)


def _with_edges(boxes: Tensor, offset: int) -> Tensor:
    """Moves x2 and y2 from the last pixel to the edge, if that is what they are."""
    return boxes + boxes.new_tensor([0, 0, offset, offset])
