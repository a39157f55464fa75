"""torch versions of the mmcv ops that a DETR calls.

Every function keeps the argument order, the keyword names and the in-place convention
of its C++ namesake, because mmcv's own Python wrappers call it; a backward recomputes
its forward and fills the ``grad_`` tensors. The mathematics is mmcv's reference or
torchvision's, in float32 or wider: half precision holds neither coordinates of an image
nor the tail of a sigmoid.
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
    """Samples every level at the given points and adds them up by weight.

    This is eq. 3 of Deformable DETR (arXiv 2010.04159).

    Args:
        value: Features of all levels, ``(batch, keys, heads, channels)``.
        value_spatial_shapes: Height and width of each level, ``(levels, 2)``.
        value_level_start_index: First key of each level; follows from the shapes.
        sampling_locations: x and y in 0..1 of the image,
            ``(batch, queries, heads, levels, points, 2)``.
        attention_weights: ``(batch, queries, heads, levels, points)``.
        im2col_step: Images per CUDA launch; without effect here.

    Returns:
        ``(batch, queries, heads * channels)`` in the dtype of ``value``.
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
    """Fills the gradients of features, locations and weights."""
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
    """Writes the focal loss (arXiv 1708.02002, eq. 5) of every logit into ``output``.

    Args:
        input: Logits, ``(rows, classes)``.
        target: Class index of each row; any other number is background, ``(rows,)``.
        weight: Weight of each target class, ``(classes,)``, or empty; background
            weighs one.
        output: Filled with the loss, ``(rows, classes)``.
        gamma: Focusing exponent.
        alpha: Weight of the positive term, 0 to 1; the negative one has the rest.
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
    """Fills ``grad_input`` with the derivative of every loss by its own logit."""
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
    # torchvision's takes 1 - p: where p rounds to 1 its slope is not a number for a
    # gamma below 1.
    focus = torch.exp(gamma * logsigmoid(-right))
    loss = -focus * logsigmoid(right)
    loss = torch.where(positive, alpha * loss, (1 - alpha) * loss)
    if weight.numel() == 0:
        return loss
    # The compiled op reads past the weights for a background row.
    known = (target >= 0) & (target < weight.numel())
    return loss * torch.where(known, weight[target.where(known, 0)], 1)[:, None]


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
    """Lowers the scores of overlapping boxes instead of dropping the boxes.

    This is Soft-NMS (arXiv 1704.04503), which torchvision does not have.

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
    """Writes the average-pooled regions (Mask R-CNN) into ``output``.

    Args:
        input: Feature map, ``(batch, channels, height, width)``.
        rois: Image index and x1, y1, x2, y2, ``(regions, 5)``.
        output: Filled, ``(regions, channels, aligned_height, aligned_width)``.
        argmax_y: Only for maximum pooling; left alone.
        argmax_x: Only for maximum pooling; left alone.
        aligned_height: Rows of the output.
        aligned_width: Columns of the output.
        spatial_scale: Feature pixels per unit of the regions.
        sampling_ratio: Samples per bin and axis; 0 adapts to the region.
        pool_mode: 1 for the average; 0, the maximum, is not here.
        aligned: Whether pixel centres lie at half coordinates.

    Raises:
        RuntimeError: For maximum pooling.
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
    """Fills ``grad_input`` with the gradient of the feature map."""
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
    """Returns the tensor in float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
