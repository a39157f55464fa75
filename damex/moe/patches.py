"""Feature maps as grids of patches, and which of these hold a part of an image.

Axes: B images, C channels, H x W cells of a map, N patches per map in rows from the top
left, P x Q cells of a patch (with its halo, where there is one).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def patch_grid(size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Patches down and across; what does not divide gets one patch more.

    Args:
        size: (H, W) of the map.
        patch_size: (height, width) of a patch.
    """
    return -(-size[0] // patch_size[0]), -(-size[1] // patch_size[1])


def split_patches(
    map_BCHW: Tensor, patch_size: tuple[int, int], *, halo: int = 0
) -> Tensor:
    """Cuts a map into patches that do not overlap.

    A map whose sides the patch does not divide is filled up with zeros at the right and
    at the bottom, as a convolution does at the border.

    Args:
        map_BCHW: Feature map.
        patch_size: (height, width) of a patch.
        halo: Cells of the neighbours that each patch sees on every side as well; zeros
            outside of the map.

    Returns:
        patches_BNCPQ: P and Q are the patch size + 2 * halo.
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
    """Puts patches without a halo back; the opposite of `split_patches`.

    Args:
        patches_BNCPQ: All patches of every map.
        size: (H, W) of the map; cells that hang over are cut off.

    Returns:
        map_BCHW.
    """
    patch_size = (patches_BNCPQ.shape[3], patches_BNCPQ.shape[4])
    grid = patch_grid(size, patch_size)
    rows = patches_BNCPQ.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5)
    map_BCHW = rows.flatten(4, 5).flatten(2, 3)
    return map_BCHW[:, :, : size[0], : size[1]]


def real_patches(
    share_B2: Tensor, size: tuple[int, int], patch_size: tuple[int, int]
) -> Tensor:
    """Which patches hold a part of their image and not only padding.

    Args:
        share_B2: The part of the (height, width) of the map that is image, in (0, 1];
            the rest, at the bottom and at the right, is padding.
        size: (H, W) of the map.
        patch_size: (height, width) of a patch.

    Returns:
        mask_BN: True for a patch whose first cell, at least, touches the image.
    """
    down, across = patch_grid(size, patch_size)
    top = torch.arange(down, device=share_B2.device) * patch_size[0]
    left = torch.arange(across, device=share_B2.device) * patch_size[1]
    # Half a pixel of a very large image is less than the tolerance against rounding.
    rows_B = share_B2[:, :1].double() * size[0] - 1e-6
    columns_B = share_B2[:, 1:].double() * size[1] - 1e-6
    return ((top < rows_B).unsqueeze(2) & (left < columns_B).unsqueeze(1)).flatten(1)
