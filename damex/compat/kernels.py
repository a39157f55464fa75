"""torch versions of the mmcv ops used by DETRs; deformops for attention on a GPU.

Argument order, keywords and in-place outputs are those with which mmcv's wrappers call
the C++ ops; backward functions recompute the forward pass and fill the gradients. All
compute in float32 or wider: half precision holds neither image coordinates nor the tail
of a sigmoid.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, logsigmoid
from torch.utils.checkpoint import checkpoint

GPU = "cuda"  # the type of device on which attention is fused, or recomputed
AVERAGE = 1  # pool_mode of roi_align


def deformable_attention(
    value: Tensor,
    shapes: Tensor | Sequence[Sequence[int]],
    locations: Tensor,
    weights: Tensor,
) -> Tensor:
    """Sample every level at the given points and sum by weight; zero outside the image.

    Eq. 3 of Deformable DETR (arXiv 2010.04159), with the arguments of mmcv's
    ``multi_scale_deformable_attn_pytorch``, whose points of a query are the last axis
    and whose levels are stacked. Here queries are the last axis, so sums run along
    memory, and levels are accumulated.

    Args:
        value: Features of all levels, ``(batch, keys, heads, channels)``.
        shapes: Height and width of each level, ``(levels, 2)``; an export has numbers.
        locations: x and y in 0..1 of the image, ``(batch, queries, heads, levels,
            points, 2)``.
        weights: ``(batch, queries, heads, levels, points)``.

    Returns:
        ``(batch, queries, heads * channels)``, in the dtype of ``value``.
    """
    # B: image and head, C: channels, K: keys, L: levels, P: points, Q: queries.
    batch, heads, dtype = value.shape[0], value.shape[2], value.dtype
    value = _widen(value)
    locations, weights = locations.to(value.dtype), weights.to(value.dtype)
    # A list synchronises once, a tensor once per level.
    sizes = shapes.tolist() if isinstance(shapes, Tensor) else shapes
    value_BCK = value.permute(0, 2, 3, 1).flatten(0, 1)
    maps = value_BCK.split([height * width for height, width in sizes], dim=-1)
    points_LBPQ2 = (2 * locations - 1).permute(3, 0, 2, 4, 1, 5).flatten(1, 2)
    weights_LBPQ = weights.permute(3, 0, 2, 4, 1).flatten(1, 2)
    total_BCQ = value.new_zeros(())
    for size, map_BCK, points_BPQ2, weights_BPQ in zip(
        sizes, maps, points_LBPQ2, weights_LBPQ, strict=True
    ):
        sampled_BCPQ = grid_sample(
            map_BCK.unflatten(-1, size),
            points_BPQ2,
            mode="bilinear",
            padding_mode="zeros",
            align_corners=False,
        )
        total_BCQ = total_BCQ + (sampled_BCPQ * weights_BPQ[:, None]).sum(2)
    total_BQC = total_BCQ.unflatten(0, (batch, heads)).permute(0, 3, 1, 2).flatten(2)
    return total_BQC.to(dtype)


def use_in_mmcv(*, is_compiled: bool) -> None:
    """Make mmcv's attention layers call :func:`attend`, except for a compiled op."""
    from mmcv.ops import multi_scale_deform_attn as of_mmcv

    of_mmcv.multi_scale_deformable_attn_pytorch = attend
    if not is_compiled:
        of_mmcv.MultiScaleDeformableAttnFunction = SimpleNamespace(
            apply=lambda value, shapes, _starts, locations, weights, _step: attend(
                value, shapes, locations, weights
            )
        )


def attend(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """:func:`deformable_attention` in the fastest way that works on this device.

    On a GPU that is deformops. Without it, the backward pass samples again instead of
    keeping several hundred MB per image and layer of an encoder.
    """
    inputs = value, shapes, locations, weights
    if value.device.type != GPU:
        return deformable_attention(*inputs)
    problem = fused_problem(value.device, value.dtype, value.shape[-1])
    log_choice(f"torch's grid_sample, as {problem}" if problem else "deformops")
    if not problem:
        return fused_attention(*inputs)
    return checkpoint(
        deformable_attention, *inputs, use_reentrant=False, preserve_rng_state=False
    )


def fused_attention(
    value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    """:func:`deformable_attention` by deformops; returns the dtype of ``value``.

    Its Triton kernels compute coordinates and sums in float32.
    """
    from deformops.registry import msda

    sizes_L = shapes.prod(1)
    starts_L = sizes_L.cumsum(0) - sizes_L
    weights = weights.to(value.dtype)  # demanded of weights, not of locations
    # Without fp32acc, Hopper and newer GPUs sum gradients in half precision.
    return msda(value, shapes, starts_L, locations, weights, fp32acc=True)


@cache
def log_choice(choice: str) -> None:
    """Log once how deformable attention is computed on the GPU."""
    from mmengine.logging import print_log

    level = logging.INFO if choice == "deformops" else logging.WARNING
    print_log(f"deformable attention on the GPU: {choice}", "current", level)


@cache
def fused_problem(device: torch.device, dtype: torch.dtype, channels: int) -> str:
    """Return why deformops cannot be used on this device, or an empty string.

    Its kernels are compiled for heads with this many channels, and have to agree with
    torch in a small case, forward and backward.
    """
    if find_spec("deformops") is None:
        return "deformops is missing: pip install 'damex[gpu]' (Python 3.12 or 3.13)"
    try:
        _compare_fused(device, dtype, channels)
    except Exception as error:  # any: of its import, of a compiler or of a GPU
        text = f"deformops fails: {type(error).__name__}: {error}"
        return " ".join(text.split())[:400]
    return ""


def _compare_fused(device: torch.device, dtype: torch.dtype, channels: int) -> None:
    """Raise an error unless deformops does what torch does."""
    generator = torch.Generator().manual_seed(0)  # leaves the global one alone
    shapes = torch.tensor([[4, 6], [2, 3]], device=device)
    sizes = ((1, 30, 2, channels), (1, 16, 2, 2, 4, 2), (1, 16, 2, 2, 4))
    value, points, weights = (torch.rand(one, generator=generator) for one in sizes)
    drawn = (value.to(device, dtype), points.to(device), weights.to(device, dtype))
    found = []
    normal = torch.inference_mode(mode=False), torch.autocast(GPU, enabled=False)
    with normal[0], normal[1], torch.enable_grad():
        for compute in (fused_attention, deformable_attention):
            value, points, weights = (one.clone().requires_grad_() for one in drawn)
            output = compute(value, shapes, points, weights)
            grads = torch.autograd.grad(output.sum(), (value, points, weights))
            found.append((output, *grads))
    rtol = 0.03 if dtype.itemsize == 2 else 1e-4
    torch.testing.assert_close(*found, rtol=rtol, atol=1e-3, check_dtype=False)


def sigmoid_focal_loss_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor,
    output: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Write the focal loss (arXiv 1708.02002, eq. 5) of every logit into ``output``.

    ``logits`` and ``output`` are ``(rows, classes)``; ``target`` holds class indices
    ``(rows,)``, any other number is background; ``weight`` is per class or empty, and
    background weighs one. The positive term has the weight ``alpha``, the negative one
    1 - alpha.
    """
    output.copy_(_focal_loss(logits, target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor,
    grad_input: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Fill ``grad_input`` with the derivative of every loss by its own logit."""
    logits = logits.detach().requires_grad_()
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
    from torchvision import ops  # imports torch's compiler, which takes a second

    edges = _widen(boxes) + boxes.new_tensor([0, 0, offset, offset])
    return ops.nms(edges, _widen(scores), iou_threshold)


def roi_align_forward(
    features: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    **settings: Any,
) -> None:
    """Write the average-pooled regions (Mask R-CNN) into ``output``.

    ``argmax_y`` and ``argmax_x`` are for maximum pooling and stay unchanged.

    Raises:
        RuntimeError: For maximum pooling, which is not implemented.
    """
    output.copy_(_roi_align(_widen(features), rois, **settings))


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    **settings: Any,
) -> None:
    """Fill ``grad_input`` with the gradient of the feature map."""
    # The op is linear in the features, so any features give the gradient.
    features = _widen(torch.zeros_like(grad_input)).requires_grad_()
    with torch.enable_grad():
        pooled = _roi_align(features, rois, **settings)
    (gradient,) = torch.autograd.grad(pooled, features, grad_output.to(pooled.dtype))
    grad_input.copy_(gradient)


def _roi_align(
    features: Tensor,
    rois: Tensor,
    *,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> Tensor:
    """Average pooling of regions.

    ``rois`` holds image index, x1, y1, x2, y2, ``(regions, 5)``; ``spatial_scale`` is
    feature pixels per unit of these; ``sampling_ratio`` is samples per bin and axis, 0
    adapts to the region; if ``aligned``, pixel centres lie at half coordinates.
    """
    if pool_mode != AVERAGE:
        raise RuntimeError(
            "mmcv op 'roi_align' with pool_mode='max': mmcv was installed without "
            "compiled ops and the stub of damex only averages. Use "
            "pool_mode='avg', or install an mmcv with compiled ops."
        )
    from torchvision import ops

    regions, size = rois.to(features.dtype), (aligned_height, aligned_width)
    return ops.roi_align(
        features, regions, size, spatial_scale, sampling_ratio, aligned
    )


def _widen(tensor: Tensor) -> Tensor:
    """Convert to float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
