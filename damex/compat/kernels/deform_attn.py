"""Multi-scale deformable attention (Deformable DETR, arXiv 2010.04159, eq. 3).

mmcv has this op in pure torch and uses it on the CPU. Here the same code serves
the wrapper that mmcv calls on CUDA, which wants a forward and a backward.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Samples every level at the given points and adds them up by weight.

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
    """Writes the three gradients in place, from a second forward.

    Args:
        value: As in the forward.
        value_spatial_shapes: As in the forward.
        value_level_start_index: As in the forward.
        sampling_locations: As in the forward.
        attention_weights: As in the forward.
        grad_output: Gradient of the output, ``(batch, queries, heads * channels)``.
        grad_value: Filled with the gradient of ``value``.
        grad_sampling_loc: Filled with the gradient of ``sampling_locations``.
        grad_attn_weight: Filled with the gradient of ``attention_weights``.
        im2col_step: As in the forward.
    """
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
    """Calls mmcv's reference in float32 or wider."""
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

    # In half precision a location has 11 bits: too few to sample between pixels.
    dtype = torch.promote_types(value.dtype, torch.float32)
    # A list costs one wait for the device, a tensor one per level.
    return multi_scale_deformable_attn_pytorch(
        value.to(dtype), shapes.tolist(), locations.to(dtype), weights.to(dtype)
    )
