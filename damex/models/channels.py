"""DeepMoE in a detector of mmdet: channels gated by an embedding of the image.

Axes: B images, H and W their height and width, E entries of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.errors import ConfigError
from damex.models.build import build_module
from damex.models.channel_blocks import GatedFFNBlock, GatedResidualBlock
from damex.models.config import ChannelConfig, LayersConfig
from damex.models.context import RoutingContext
from damex.models.queries import image_mask_of
from damex.models.sites import chosen_layers, chosen_stages
from damex.moe import ChannelGates, GatingPath, active_share, gate_l1, presence_loss


class ChannelGating(nn.Module):
    """Computes the gates of a batch for the gated layers, and their losses."""

    def __init__(self, path: GatingPath, settings: ChannelConfig) -> None:
        super().__init__()
        self.path = path
        self.settings = settings

    def forward(
        self, images_BCHW: Tensor, samples: Sequence[Any] | None
    ) -> ChannelGates:
        """Compute the gates of normalized, padded images.

        ``samples`` provide the padding; no dataset id is read.
        """
        return self.path(images_BCHW, image_mask_of(images_BCHW, samples))

    def losses(
        self, gates: ChannelGates, samples: Sequence[Any], group_ids_B: Tensor | None
    ) -> dict[str, Tensor]:
        """Compute the losses of one step for mmdet's loss dict.

        ``group_ids_B`` is -1 where unknown, and None if all are.

        Returns:
            ``loss_moe_l1`` and ``loss_moe_embedding``, weighted, and
            ``moe_active_channels``: share of open channels in [0, 1]. Losses of weight
            zero, or of a frozen path, are omitted.
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
    """Return a mask of the classes that have a box in each image."""
    present_BE = torch.zeros_like(logits_BE, dtype=torch.bool)
    for image, sample in enumerate(samples):
        present_BE[image, sample.gt_instances.labels] = True
    return present_BE


def _dataset_BE(logits_BE: Tensor, group_ids_B: Tensor | None) -> Tensor:
    """Return the one-hot dataset group of each image; all False if unknown."""
    if group_ids_B is None:
        return torch.zeros_like(logits_BE, dtype=torch.bool)
    one_hot_BE = functional.one_hot(group_ids_B.clamp(min=0), logits_BE.shape[1])
    return one_hot_BE.bool() & (group_ids_B >= 0)[:, None]


@dataclass(frozen=True)
class ChannelReport:
    """Gated layers and the cost of gating."""

    channels: Mapping[str, int]
    parameters: int
    frozen: bool
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        state = ", frozen: load the gates of stage 1" if self.frozen else ""
        rows = [f"  {name}: {count} channels" for name, count in self.channels.items()]
        return "\n".join(
            [
                f"gates on {sum(self.channels.values()):,} channels of {len(rows)} "
                f"layers ({self.parameters:,} parameters more{state}):",
                *rows,
            ]
        )


def insert_channels(
    detector: Any,
    layers: LayersConfig,
    settings: ChannelConfig,
    *,
    context: RoutingContext,
    num_groups: int | None,
) -> tuple[ChannelGating, ChannelReport]:
    """Gate the channels of chosen layers; return their gating path and a report.

    The detector has to register the path. ``num_groups`` is None outside of a mixture.

    Raises:
        ConfigError: If a layer does not exist or cannot be gated.
    """
    embedding = _build_embedding(
        settings, _num_targets(detector, settings.aux_target, num_groups)
    )
    channels: dict[str, int] = {}
    mount: dict[str, Any] = dict(context=context, skip_closed=settings.skip_closed)
    for component, chosen in layers.chosen.items():
        if component == "backbone":
            channels.update(_gate_backbone(detector, chosen, **mount))
            continue
        for name, layer in chosen_layers(detector, component, chosen):
            layer.ffn = GatedFFNBlock(layer.ffn, name=name, **mount)
            channels.update(layer.ffn.channels)
    try:
        path = GatingPath(embedding, channels, init=settings.gate_init)
    except ValueError as error:
        raise ConfigError(f"moe.channels.gate_init: {error}") from error
    if settings.frozen:
        path.freeze()
    gating = ChannelGating(path, settings)
    parameters = sum(p.numel() for p in gating.parameters())
    return gating, ChannelReport(channels, parameters, path.frozen)


def _build_embedding(settings: ChannelConfig, num_targets: int) -> Any:
    embedding = build_module(
        settings.embedding, "channels.embedding", offer=dict(embed_dims=num_targets)
    )
    if settings.aux_weight > 0.0 and embedding.embed_dims != num_targets:
        raise ConfigError(
            f"moe.channels.embedding.embed_dims is {embedding.embed_dims}, but the "
            f"auxiliary loss tells {num_targets} {settings.aux_target} apart; leave "
            "embed_dims out, or set aux_weight=0."
        )
    return embedding


def _num_targets(detector: Any, target: str, num_groups: int | None) -> int:
    """Return the number of targets of the auxiliary loss."""
    if target == "classes":
        return detector.bbox_head.num_classes
    if num_groups is None:
        raise ConfigError(
            "moe.channels.aux_target is 'datasets', but there is no mixture to take "
            "the dataset groups from; use 'classes', or train on a MixtureDataset."
        )
    return num_groups


def _gate_backbone(detector: Any, chosen: Any, **mount: Any) -> dict[str, int]:
    """Gate the blocks of chosen stages; return channels by layer."""
    channels: dict[str, int] = {}
    for stage, layer in chosen_stages(detector, chosen):
        blocks = getattr(detector.backbone, layer)
        for number, block in enumerate(blocks):
            name = f"backbone.{stage}.{number}"
            blocks[number] = GatedResidualBlock(block, name=name, **mount)
            channels.update(blocks[number].channels)
    return channels
