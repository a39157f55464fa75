"""Experts on patches of feature maps (pMoE).

Axes: B images, C channels, H x W cells of a map, N patches per map in rows from the top
left, P x Q cells of a patch (including its halo, if any).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.errors import check_choice, check_sizes
from damex.moe.grouped import map_segments
from damex.moe.layer import MoELayer
from damex.moe.routing import Packing, RoutingRecord


def patch_grid(size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Return the number of patches down and across, rounded up."""
    return -(-size[0] // patch_size[0]), -(-size[1] // patch_size[1])


def split_patches(
    map_BCHW: Tensor, patch_size: tuple[int, int], *, halo: int = 0
) -> Tensor:
    """Cut a map into patches that do not overlap, zero-padded at the bottom right.

    With a halo, each patch includes that many cells of its neighbors on every side
    (zeros outside of the map), so P and Q are the patch size + 2 * halo.
    """
    height, width = patch_size
    down, across = patch_grid((map_BCHW.shape[2], map_BCHW.shape[3]), patch_size)
    bottom = down * height - map_BCHW.shape[2]
    right = across * width - map_BCHW.shape[3]
    padded = functional.pad(map_BCHW, (halo, right + halo, halo, bottom + halo))
    windows = padded.unfold(2, height + 2 * halo, height)
    windows = windows.unfold(3, width + 2 * halo, width)
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def merge_patches(patches_BNCPQ: Tensor, size: tuple[int, int]) -> Tensor:
    """Undo `split_patches` without halo; padding beyond `size` (H, W) is cut off."""
    patch_size = (patches_BNCPQ.shape[3], patches_BNCPQ.shape[4])
    grid = patch_grid(size, patch_size)
    rows = patches_BNCPQ.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5)
    map_BCHW = rows.flatten(4, 5).flatten(2, 3)
    return map_BCHW[:, :, : size[0], : size[1]]


def real_patches(
    share_B2: Tensor, size: tuple[int, int], patch_size: tuple[int, int]
) -> Tensor:
    """Return a mask (B, N) of patches that contain a part of their image.

    `share_B2` is the share of the map's (height, width), `size`, that is image, in (0,
    1]; the rest, at the bottom and right, is padding.
    """
    down, across = patch_grid(size, patch_size)
    top = torch.arange(down, device=share_B2.device) * patch_size[0]
    left = torch.arange(across, device=share_B2.device) * patch_size[1]
    # The tolerance against rounding is below half a pixel of very large images.
    rows_B = share_B2[:, :1].double() * size[0] - 1e-6
    columns_B = share_B2[:, 1:].double() * size[1] - 1e-6
    return ((top < rows_B).unsqueeze(2) & (left < columns_B).unsqueeze(1)).flatten(1)


BORDERS = ("zeros", "neighbours")


class PatchConvExperts(nn.Module):
    """E convolutions without bias, each with an equal slice of the output channels.

    Expert e holds output channels e*O to (e+1)*O - 1 of a dense convolution: together
    the experts have its parameters, and each computes for its patches only.

    Args:
        out_channels: F; a multiple of E.
        patch_size: Side of a patch in cells, or (height, width).
        kernel_size: K, odd. 1 needs fewer parameters (pMoE on CIFAR-10).
        border: What a kernel sees outside of its patch: 'zeros', so that patches are
            independent as in the theory of pMoE, or 'neighbours', the actual map:
            experts that get all patches with weight 1 then equal a dense convolution,
            and pretrained kernels keep their meaning.
    """

    expert_rows = ("weight_EOCKK",)

    def __init__(
        self,
        num_experts: int,
        in_channels: int,
        out_channels: int,
        *,
        patch_size: int | tuple[int, int],
        kernel_size: int = 3,
        border: Literal["zeros", "neighbours"] = "zeros",
    ) -> None:
        super().__init__()
        self.patch_size = _as_pair(patch_size)
        check_sizes(
            "PatchConvExperts",
            num_experts=num_experts,
            in_channels=in_channels,
            out_channels=out_channels,
        )
        if out_channels % num_experts:
            raise ValueError(
                "PatchConvExperts: num_experts must divide out_channels, as each "
                f"expert has an equal share of the channels, got {num_experts} experts "
                f"and {out_channels} channels"
            )
        if type(kernel_size) is not int or kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(
                "PatchConvExperts: kernel_size must be an odd positive integer, got "
                f"{kernel_size!r}"
            )
        check_choice("PatchConvExperts", BORDERS, border=border)
        self.num_experts = num_experts
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.border = border
        self.weight_EOCKK = nn.Parameter(
            torch.empty(
                num_experts,
                out_channels // num_experts,
                in_channels,
                kernel_size,
                kernel_size,
            )
        )
        self.reset_parameters()

    @property
    def halo(self) -> int:
        """Cells of the neighbors around a patch that a row includes."""
        return self.kernel_size // 2 if self.border == "neighbours" else 0

    @property
    def embed_dims(self) -> int:
        """Number of values of a patch, which the router scores."""
        return self.in_channels * self.patch_size[0] * self.patch_size[1]

    def reset_parameters(self) -> None:
        """Re-initialize as mmdet's ResNet, kaiming normal with fan-out F K^2."""
        fan_out = self.out_channels * self.kernel_size**2
        nn.init.normal_(self.weight_EOCKK, std=math.sqrt(2.0 / fan_out))

    def forward(self, patches_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply each expert to its segment of flattened patches (with halo).

        Returns rows of O * patch height * patch width values; `counts_E` sums to R.
        """
        height, width = (side + 2 * self.halo for side in self.patch_size)
        patches = patches_RD.unflatten(1, (self.in_channels, height, width))
        convolve = partial(functional.conv2d, padding=self.kernel_size // 2 - self.halo)
        out = map_segments(convolve, patches, [self.weight_EOCKK], counts_E)
        return out.flatten(1)


def route_patches(
    moe: MoELayer,
    map_BCHW: Tensor,
    *,
    packing: Packing | None = None,
    group_ids_B: Tensor | None = None,
    earlier_votes_BG: Tensor | None = None,
) -> tuple[Tensor, RoutingRecord]:
    """Convolve a map patch by patch with the experts that chose each patch.

    pMoE (Chowdhury et al., ICML 2023, arXiv 2306.04073), section 5.2: the router scores
    flattened patches, the gate chooses, and the outputs of the experts are concatenated
    as channels, zero for experts that did not take the patch. Only taken patches are
    computed: expert choice of l of n patches costs l/n of a dense convolution. The
    weight of a route scales the output, which without bias equals scaling the patch, as
    in the released code, up to the batch norm in between.

    The map is zero-padded at the bottom right to whole patches; `packing` may be that
    of `real_patches`. Raises ValueError without `PatchConvExperts`, or as
    `MoELayer.forward`.
    """
    experts = moe.experts
    if not isinstance(experts, PatchConvExperts):
        raise ValueError(
            "route_patches: the layer needs PatchConvExperts, got "
            f"{type(experts).__name__}"
        )
    # pMoE, section 5.2: the last convolution's map in n patches.
    patches_BNCPQ = split_patches(map_BCHW, experts.patch_size)
    record = moe.route(
        patches_BNCPQ.flatten(2),
        packing=packing,
        group_ids_B=group_ids_B,
        earlier_votes_BG=earlier_votes_BG,
    )
    if experts.halo:
        patches_BNCPQ = split_patches(map_BCHW, experts.patch_size, halo=experts.halo)
    assignment = record.assignment
    rows_RD = assignment.dispatch(record.packing.pack(patches_BNCPQ.flatten(2)))
    out_RD = experts(rows_RD, assignment.counts_E)
    # pMoE, eq. 1: the gating value G_js multiplies the output of expert s for patch j.
    weighted_RD = (out_RD * assignment.weight_R.unsqueeze(1)).to(out_RD.dtype)
    # One slot per patch and slice of channels.
    slot_R = assignment.token_index_R * experts.num_experts + assignment.expert_index_R
    shape = (assignment.num_tokens, experts.out_channels, *experts.patch_size)
    slots = weighted_RD.new_zeros(shape).view(-1, weighted_RD.shape[1])
    out_VFPQ = slots.index_copy(0, slot_R, weighted_RD).view(shape)
    size = (map_BCHW.shape[2], map_BCHW.shape[3])
    return merge_patches(record.packing.unpack(out_VFPQ), size), record


def _as_pair(patch_size: int | tuple[int, int]) -> tuple[int, int]:
    sides = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    valid = isinstance(sides, (tuple, list)) and len(sides) == 2
    if not valid or not all(type(side) is int and side >= 1 for side in sides):
        raise ValueError(
            "PatchConvExperts: patch_size must be a positive integer or a pair of "
            f"them, got {patch_size!r}"
        )
    return sides[0], sides[1]
