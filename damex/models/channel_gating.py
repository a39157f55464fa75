"""ChannelGating: DeepMoE's gating path as a part of a detector of mmdet.

Axes: B images, H and W their height and width, E entries of the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.models.config import ChannelConfig
from damex.models.queries import image_mask_of
from damex.moe import ChannelGates, GatingPath, active_share, gate_l1, presence_loss


class ChannelGating(nn.Module):
    """Looks at a batch once, hands gates to the gated layers, and has their losses.

    Args:
        path: The embedding and one gate per layer.
        settings: Weights and target of the losses.
    """

    def __init__(self, path: GatingPath, settings: ChannelConfig) -> None:
        super().__init__()
        self.path = path
        self.settings = settings

    def forward(
        self, images_BCHW: Tensor, samples: Sequence[Any] | None
    ) -> ChannelGates:
        """Look at a batch.

        Args:
            images_BCHW: The detector's input, normalised and padded.
            samples: Their data samples, which know the padding. No dataset id is read.
        """
        return self.path(images_BCHW, image_mask_of(images_BCHW, samples))

    def losses(
        self, gates: ChannelGates, samples: Sequence[Any], group_ids_B: Tensor | None
    ) -> dict[str, Tensor]:
        """Losses of one step for mmdet's loss dict.

        Args:
            gates: Of the images.
            samples: Data samples with ground truth.
            group_ids_B: Dataset group of every image, -1 where unknown; None where
                none is known.

        Returns:
            ``loss_moe_l1`` and ``loss_moe_embedding``, weighted, and
            ``moe_active_channels``: share of open channels in [0, 1]. A loss of weight
            zero, or of a frozen path, is not there.
        """
        layers = list(gates.layers.values())
        result = {"moe_active_channels": active_share(layers)}
        if self.path.frozen:
            return result
        if self.settings.l1_weight > 0.0:
            result["loss_moe_l1"] = self.settings.l1_weight * gate_l1(layers)
        if self.settings.aux_weight > 0.0:
            if self.settings.aux_target == "datasets":
                present_BE = _dataset_BE(gates.logits_BE, group_ids_B)
            else:
                present_BE = _classes_BE(gates.logits_BE, samples)
            loss = presence_loss(gates.logits_BE, present_BE)
            result["loss_moe_embedding"] = self.settings.aux_weight * loss
        return result


def _classes_BE(logits_BE: Tensor, samples: Sequence[Any]) -> Tensor:
    """Which classes have a box in an image."""
    present_BE = torch.zeros_like(logits_BE, dtype=torch.bool)
    for image, sample in enumerate(samples):
        present_BE[image, sample.gt_instances.labels] = True
    return present_BE


def _dataset_BE(logits_BE: Tensor, group_ids_B: Tensor | None) -> Tensor:
    """Which dataset group an image comes from; none where that is unknown."""
    if group_ids_B is None:
        return torch.zeros_like(logits_BE, dtype=torch.bool)
    one_hot_BE = functional.one_hot(group_ids_B.clamp(min=0), logits_BE.shape[1])
    return one_hot_BE.bool() & (group_ids_B >= 0)[:, None]
