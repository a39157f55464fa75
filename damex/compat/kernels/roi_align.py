"""RoIAlign with average pooling (Mask R-CNN, arXiv 1703.06870), from torchvision."""

from __future__ import annotations

import torch
from torch import Tensor

AVERAGE = 1


def roi_align_forward(
    input: Tensor,  # noqa: A002 - mmcv's argument name
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
    """Writes the pooled regions into ``output``.

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
    _check_mode(pool_mode)
    size = (aligned_height, aligned_width)
    output.copy_(_pool(input, rois, size, spatial_scale, sampling_ratio, aligned))


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
    """Writes the gradient of the feature map into ``grad_input``.

    Args:
        grad_output: Gradient of the pooled regions.
        rois: As in the forward.
        argmax_y: As in the forward.
        argmax_x: As in the forward.
        grad_input: Filled, ``(batch, channels, height, width)``.
        aligned_height: As in the forward.
        aligned_width: As in the forward.
        spatial_scale: As in the forward.
        sampling_ratio: As in the forward.
        pool_mode: As in the forward.
        aligned: As in the forward.

    Raises:
        RuntimeError: For maximum pooling.
    """
    _check_mode(pool_mode)
    size = (aligned_height, aligned_width)
    # The op is linear in the features, so any features give the gradient.
    features = torch.zeros_like(grad_input).requires_grad_()
    with torch.enable_grad():
        pooled = _pool(features, rois, size, spatial_scale, sampling_ratio, aligned)
    (gradient,) = torch.autograd.grad(pooled, features, grad_output.to(pooled.dtype))
    grad_input.copy_(gradient)


def _pool(
    features: Tensor,
    rois: Tensor,
    size: tuple[int, int],
    scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Pools in float32 or wider: half precision cannot hold image coordinates."""
    from torchvision.ops import roi_align

    dtype = torch.promote_types(features.dtype, torch.float32)
    return roi_align(
        features.to(dtype), rois.to(dtype), size, scale, sampling_ratio, aligned
    )


def _check_mode(pool_mode: int) -> None:
    if pool_mode != AVERAGE:
        raise RuntimeError(
            "mmcv op 'roi_align' with pool_mode='max': mmcv was installed without "
            "compiled ops and the stand-in of damex only averages. Use "
            "pool_mode='avg', or install an mmcv with compiled ops."
        )
