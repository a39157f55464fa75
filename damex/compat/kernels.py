"""torch versions of the mmcv ops used by DETRs.

Argument order, keyword names and in-place outputs are those of the C++ ops, as mmcv's
Python wrappers call them; backward functions recompute the forward pass and fill the
``grad_`` tensors. All compute in float32 or wider: half precision holds neither image
coordinates nor the tail of a sigmoid.
"""

# ruff: noqa: A002 - `input` is mmcv's argument name

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torchvision import ops

from damex.compat.deformable_attention import deformable_attention

AVERAGE = 1  # pool_mode of roi_align
NAIVE, LINEAR = 0, 1  # method of softnms; 2 is Gaussian


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Multi-scale deformable attention; see :func:`deformable_attention` for shapes.

    ``value_level_start_index`` and ``im2col_step`` are unused. Returns the dtype of
    ``value``.
    """
    return _attend(
        value, value_spatial_shapes, sampling_locations, attention_weights
    ).to(value.dtype)


def ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int,
) -> None:
    """Fill the gradients of features, locations and weights."""
    inputs = [
        tensor.detach().requires_grad_()
        for tensor in (value, sampling_locations, attention_weights)
    ]
    with torch.enable_grad():
        output = _attend(inputs[0], value_spatial_shapes, inputs[1], inputs[2])
    gradients = torch.autograd.grad(output, inputs, grad_output.to(output.dtype))
    targets = (grad_value, grad_sampling_loc, grad_attn_weight)
    for target, gradient in zip(targets, gradients, strict=True):
        target.copy_(gradient)


def _attend(
    value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    value = _widen(value)
    return deformable_attention(
        value, shapes, locations.to(value.dtype), weights.to(value.dtype)
    )


def sigmoid_focal_loss_forward(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    output: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Write the focal loss (arXiv 1708.02002, eq. 5) of every logit into ``output``.

    ``input`` and ``output`` are ``(rows, classes)``; ``target`` holds class indices
    ``(rows,)``, any other number is background; ``weight`` is per class or empty, and
    background weighs one. The positive term has the weight ``alpha``, the negative one
    1 - alpha.
    """
    output.copy_(_focal_loss(input, target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    grad_input: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Fill ``grad_input`` with the derivative of every loss by its own logit."""
    logits = input.detach().requires_grad_()
    with torch.enable_grad():
        total = _focal_loss(logits, target, weight, gamma, alpha).sum()
    grad_input.copy_(torch.autograd.grad(total, logits)[0])


def _focal_loss(
    logits: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float
) -> Tensor:
    logits = _widen(logits)
    classes = torch.arange(logits.size(1), device=target.device)
    positive = target[:, None] == classes
    right = torch.where(positive, logits, -logits)
    # torchvision's 1 - p has a nan gradient if p rounds to 1 and gamma < 1.
    focus = torch.exp(gamma * logsigmoid(-right))
    loss = -focus * logsigmoid(right)
    loss = torch.where(positive, alpha * loss, (1 - alpha) * loss)
    if weight.numel() == 0:
        return loss
    # The compiled op reads past the weights for a background row.
    known = (target >= 0) & (target < weight.numel())
    return loss * torch.where(known, weight[target.where(known, 0)], 1)[:, None]


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Return the indices of the kept boxes, best first.

    ``boxes`` are x1, y1, x2, y2, ``(boxes, 4)``. ``offset`` is 1 if x2 and y2 are the
    last pixel of a box, 0 if they are its edge.
    """
    return ops.nms(_with_edges(_widen(boxes), offset), _widen(scores), iou_threshold)


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
    """Soft-NMS (arXiv 1704.04503): lower the scores of overlapping boxes.

    ``boxes`` are x1, y1, x2, y2, ``(boxes, 4)``. The first rows of ``dets``, ``(boxes,
    5)``, are filled with box and new score, best first. The naive (0) and linear (1)
    methods act from ``iou_threshold``; ``sigma`` is the width of the Gaussian (2).
    Boxes whose score falls below ``min_score`` are dropped.

    Returns:
        Indices into ``boxes`` of the filled rows, ``(kept,)``.
    """
    edges = _with_edges(boxes, offset)
    left = torch.arange(len(boxes))
    current = scores.clone()
    kept: list[int] = []
    while len(left):
        best = int(left[current[left].argmax()])
        dets[len(kept)] = torch.cat((boxes[best], current[best, None]))
        kept.append(best)
        left = left[left != best]
        overlap = ops.box_iou(edges[best, None], edges[left])[0]
        current[left] *= _decay(overlap, iou_threshold, sigma, method)
        left = left[current[left] >= min_score]
    return torch.tensor(kept, dtype=torch.long)


def _decay(overlap: Tensor, iou_threshold: float, sigma: float, method: int) -> Tensor:
    """Score factors of boxes that overlap a better one."""
    # Boxes without area have an IoU of nan, which is not above a threshold.
    if method == NAIVE:
        return torch.where(overlap >= iou_threshold, 0, torch.ones_like(overlap))
    if method == LINEAR:
        return torch.where(overlap >= iou_threshold, 1 - overlap, 1)
    return torch.exp(-overlap.square() / sigma)


def _with_edges(boxes: Tensor, offset: int) -> Tensor:
    """Move x2 and y2 from the last pixel to the edge, if `offset` is 1."""
    return boxes + boxes.new_tensor([0, 0, offset, offset])


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Write the average-pooled regions (Mask R-CNN) into ``output``.

    ``argmax_y`` and ``argmax_x`` are for maximum pooling and stay unchanged. ``rois``
    holds image index, x1, y1, x2, y2, ``(regions, 5)``; ``spatial_scale`` is feature
    pixels per unit of these; ``sampling_ratio`` is samples per bin and axis, 0 adapts
    to the region; if ``aligned``, pixel centres lie at half coordinates.

    Raises:
        RuntimeError: For maximum pooling, which is not implemented.
    """
    if pool_mode != AVERAGE:
        raise RuntimeError(
            "mmcv op 'roi_align' with pool_mode='max': mmcv was installed without "
            "compiled ops and the stub of damex only averages. Use "
            "pool_mode='avg', or install an mmcv with compiled ops."
        )
    features, size = _widen(input), (aligned_height, aligned_width)
    regions = rois.to(features.dtype)
    output.copy_(
        ops.roi_align(features, regions, size, spatial_scale, sampling_ratio, aligned)
    )


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Fill ``grad_input`` with the gradient of the feature map."""
    # The op is linear in the features, so any features give the gradient.
    features = _widen(torch.zeros_like(grad_input)).requires_grad_()
    regions, size = rois.to(features.dtype), (aligned_height, aligned_width)
    with torch.enable_grad():
        pooled = ops.roi_align(
            features, regions, size, spatial_scale, sampling_ratio, aligned
        )
    (gradient,) = torch.autograd.grad(pooled, features, grad_output.to(pooled.dtype))
    grad_input.copy_(gradient)


def _widen(tensor: Tensor) -> Tensor:
    """Convert to float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
