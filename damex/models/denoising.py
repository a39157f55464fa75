"""Which denoising queries of DINO are real and which only fill up the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["denoising_query_mask"]


def denoising_query_mask(
    boxes_per_image: Sequence[int],
    *,
    num_denoising: int,
    num_matching: int,
    device: torch.device | None = None,
) -> Tensor | None:
    """Mask of decoder queries, in the layout of mmdet's ``CdnQueryGenerator``.

    Denoising queries come first, in blocks as long as the largest number of boxes in
    the batch; an image with fewer boxes fills its blocks up with zeros. Those fillers
    are no tokens: they must not be routed or counted.

    Args:
        boxes_per_image: Number of boxes of each of the B images.
        num_denoising: Number of denoising queries, fillers included.
        num_matching: Number of matching queries after them.
        device: Where the mask is made.

    Returns:
        Bool tensor (B, num_denoising + num_matching), True for real queries; None
        where all are real.
    """
    block = max(boxes_per_image, default=0)
    if num_denoising == 0 or min(boxes_per_image) == block:
        return None
    counts_B1 = torch.tensor(boxes_per_image, device=device)[:, None]
    place = torch.arange(num_denoising, device=device) % block
    denoising = place[None, :] < counts_B1
    matching = denoising.new_ones(len(boxes_per_image), num_matching)
    return torch.cat([denoising, matching], dim=1)
