"""Layers for export whose sizes stay symbols, where those of mmdet and timm fix them.

``torch.export`` runs a detector with symbols as sizes. mmdet holds the sizes of feature
maps in a tensor and loops over its values, which are unknown; these layers take pairs
of numbers, so that the loops unroll over levels.

Axes: B images, D model width, L feature levels, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from damex.compat.kernels import deformable_attention


def unroll(detector: nn.Module) -> None:
    """Replace deformable attention, and convolutions that pad by size, in place.

    The detector then takes ``spatial_shapes`` as pairs of numbers, and images padded to
    whole strides.
    """
    from timm.layers import Conv2dSame  # slow to import

    new: dict[nn.Module, nn.Module] = {}  # a module may have several names
    for name, module in [*detector.named_modules(remove_duplicate=False)]:
        if module not in new:
            if isinstance(module, MultiScaleDeformableAttention):
                new[module] = UnrolledAttention(module)
            elif isinstance(module, Conv2dSame):
                new[module] = _padded_alike(module)
        if module in new:
            detector.set_submodule(name, new[module])


def size_tensor(size: Sequence[int]) -> Tensor:
    """Return numbers in float64; an exported symbol would be rounded to float32."""
    return torch.stack([torch.scalar_tensor(one, dtype=torch.double) for one in size])


class UnrolledAttention(nn.Module):
    """mmcv's deformable attention, of levels whose sizes are numbers, not a tensor."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        query: Tensor,
        value: Tensor,
        query_pos: Tensor,
        key_padding_mask: Tensor,
        reference_points: Tensor,
        spatial_shapes: Sequence[Sequence[int]],
        **_: Any,
    ) -> Tensor:
        """Add what queries (B, Q, D) see at points or boxes (B, Q, L, 2 or 4)."""
        of = self.attention
        heads, levels, points = of.num_heads, of.num_levels, of.num_points
        placed = query + query_pos
        value = of.value_proj(value).masked_fill(key_padding_mask[..., None], 0.0)
        weights = of.attention_weights(placed).unflatten(-1, (heads, -1)).softmax(-1)
        offsets = of.sampling_offsets(placed).unflatten(-1, (heads, levels, points, 2))
        where = reference_points[:, :, None, :, None]
        if where.shape[-1] == 4:
            offsets = offsets / points * where[..., 2:] * 0.5
        else:
            sizes_L2 = torch.stack([*map(size_tensor, spatial_shapes)]).flip(-1)
            offsets = offsets / sizes_L2[:, None].float()
        seen = deformable_attention(
            value.unflatten(-1, (heads, -1)),
            spatial_shapes,
            where[..., :2] + offsets,
            weights.unflatten(-1, (levels, points)),
        )
        return query + of.output_proj(seen)


def _padded_alike(conv: Any) -> nn.Module:
    """Return timm's convolution for inputs in whole strides, as in a TimmBackbone."""
    pads: Any = []  # left, right, top, bottom
    sides = zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)
    for kernel, stride, dilation in reversed([*sides]):  # width first
        total = max(dilation * (kernel - 1) + 1 - stride, 0)
        pads += total // 2, total - total // 2
    conv.__class__ = nn.Conv2d  # instead of timm's, which computes this from the size
    return nn.Sequential(nn.ZeroPad2d(pads), conv)


class UnitLinspace(TorchFunctionMode):
    """Export ``torch.linspace`` as a range: torch has none of a symbolic length.

    mmdet's have steps of 1.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.linspace:
            return func(*args, **(kwargs or {}))
        start, _, steps = args
        return start + torch.arange(steps, dtype=torch.float32)
