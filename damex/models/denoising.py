"""Denoising queries of DINO: which are real, and which gates they would mislead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from damex.errors import ConfigError
from damex.models.moe_ffn import MoEFFN
from damex.models.moe_patch_conv import MoEPatchConv
from damex.moe import ExpertChoiceGate

__all__ = ["check_denoising", "denoising_query_mask"]


def check_denoising(
    detector: nn.Module, blocks: Iterable[MoEFFN | MoEPatchConv]
) -> None:
    """Refuse gates that would let denoising queries push out matching ones.

    Denoising queries are made of the ground truth. DINO's attention mask hides them
    from the matching queries, but experts that choose among all tokens of an image
    would choose among both, and at test time there are no denoising queries.

    Args:
        detector: A built detector.
        blocks: Its MoE blocks.

    Raises:
        ConfigError: If experts choose tokens in a decoder with denoising queries.
    """
    if getattr(detector, "dn_query_generator", None) is None:
        return
    for block in blocks:
        in_decoder = block.name.startswith("decoder.")
        if in_decoder and isinstance(block.moe.gate, ExpertChoiceGate):
            raise ConfigError(
                f"moe.gate is {type(block.moe.gate).__name__} and moe.layers chooses "
                f"{block.name}, where denoising queries, made of the ground truth, "
                "would compete with the matching queries in training alone; set "
                "moe.layers=dict(encoder='even'), or another gate such as TopKGate, or "
                "use a detector without denoising queries such as MoEDeformableDETR."
            )


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
