"""Insertion of DeepMoE: gate the channels of a built mmdet detector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from damex.errors import ConfigError
from damex.models.build import build_module
from damex.models.channel_blocks import GatedFFNBlock, GatedResidualBlock
from damex.models.channel_gating import ChannelGating
from damex.models.config import ChannelConfig, LayersConfig
from damex.models.context import RoutingContext
from damex.models.sites import chosen_layers, chosen_stages
from damex.moe import GatingPath


@dataclass(frozen=True)
class ChannelReport:
    """Every gated layer and what gating adds."""

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
    """Gate the channels of chosen layers, and build the path that decides about them.

    Args:
        detector: A built detector.
        layers: The layers to gate.
        settings: How to gate them.
        context: What the gated layers read during a forward pass.
        num_groups: Number of dataset groups; None outside of a mixture.

    Returns:
        The gating path with its losses, for the detector to hold, and what was gated.

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
    """How many things the auxiliary loss tells apart."""
    if target == "classes":
        return detector.bbox_head.num_classes
    if num_groups is None:
        raise ConfigError(
            "moe.channels.aux_target is 'datasets', but there is no mixture to take "
            "the dataset groups from; use 'classes', or train on a MixtureDataset."
        )
    return num_groups


def _gate_backbone(detector: Any, chosen: Any, **mount: Any) -> dict[str, int]:
    """Gate the blocks of chosen stages; returns channels by layer."""
    channels: dict[str, int] = {}
    for stage, layer in chosen_stages(detector, chosen):
        blocks = getattr(detector.backbone, layer)
        for number, block in enumerate(blocks):
            name = f"backbone.{stage}.{number}"
            blocks[number] = GatedResidualBlock(block, name=name, **mount)
            channels.update(blocks[number].channels)
    return channels
