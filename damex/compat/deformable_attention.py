"""Deformable attention on the CPU, ordered by memory access.

mmcv's version keeps the points of a query in the last axis and stacks the levels. Here
the queries are the last axis, so sums run along memory, and levels are accumulated.
"""

from __future__ import annotations

from torch import Tensor
from torch.jit import is_tracing
from torch.nn.functional import grid_sample


def deformable_attention(
    value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    """Sample every level at the given points and sum by weight; zero outside the image.

    Eq. 3 of Deformable DETR (arXiv 2010.04159), with the arguments of mmcv's
    ``multi_scale_deformable_attn_pytorch``.

    Args:
        value: Features of all levels, ``(batch, keys, heads, channels)``.
        shapes: Height and width of each level, ``(levels, 2)``.
        locations: x and y in 0..1 of the image, ``(batch, queries, heads, levels,
            points, 2)``.
        weights: ``(batch, queries, heads, levels, points)``.

    Returns:
        ``(batch, queries, heads * channels)``.
    """
    # B: image and head, C: channels, K: keys, L: levels, P: points, Q: queries.
    batch, heads = value.shape[0], value.shape[2]
    # A list synchronises once, a tensor once per level; tracing needs tensors to keep
    # sizes dynamic.
    sizes = [tuple(one) for one in (shapes if is_tracing() else shapes.tolist())]
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
    return total_BCQ.unflatten(0, (batch, heads)).permute(0, 3, 1, 2).flatten(2)


def use_in_mmcv() -> None:
    """Make mmcv's attention layers call :func:`deformable_attention` off the GPU."""
    from mmcv.ops import multi_scale_deform_attn as of_mmcv

    of_mmcv.multi_scale_deformable_attn_pytorch = deformable_attention
