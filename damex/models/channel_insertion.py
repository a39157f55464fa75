"""Insertion of DeepMoE: gate the channels of a built mmdet detector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmdet.models.backbones import ResNet
from torch import nn

from damex.errors import ConfigError, did_you_mean
from damex.models.build import build_part
from damex.models.channel_blocks import GatedFFNBlock, GatedResidualBlock
from damex.models.channel_gating import ChannelContext, ChannelGating
from damex.models.config import layers_of
from damex.models.sites import (
    PARTS,
    backbone_stages,
    layer_numbers,
    transformer_layer,
)
from damex.moe import GatingPath

__all__ = ["ChannelReport", "insert_channels"]

GATED_PARTS = ("backbone", *PARTS)
TARGETS = ("classes", "datasets")
FIELDS = (
    "embedding",
    "gate_init",
    "l1_weight",
    "aux_weight",
    "aux_target",
    "frozen",
    "skip_closed",
)


@dataclass(frozen=True)
class ChannelReport:
    """Every gated layer and what gating adds."""

    channels: Mapping[str, int]
    parameters: int
    frozen: bool

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
    detector: nn.Module, moe: Mapping[str, Any], *, num_groups: int | None
) -> tuple[ChannelGating, ChannelReport]:
    """Gate the channels of chosen layers, and build the path that decides about them.

    Args:
        detector: A built detector.
        moe: ``layers=dict(backbone=[2, 3], encoder='all', decoder='even')`` (a list of
            stages or layers, ``'all'`` or ``'even'``; stages of mmdet's ResNet count
            from 0, and there is ``'last'``, too) and ``channels``, a dict with
            ``embedding`` (a dict with a ``type``; its ``embed_dims`` is the number of
            targets by default), ``gate_init``, ``l1_weight``, ``aux_weight``,
            ``aux_target`` ('classes' or 'datasets'), ``frozen`` (stage 2: the gating
            path as stage 1 left it, no losses), and ``skip_closed``. It is not changed.
        num_groups: Number of dataset groups; None outside of a mixture.

    Returns:
        The gating path with its losses, for the detector to hold, and what was gated.

    Raises:
        ConfigError: If a field is unknown or has a value that cannot work, a layer does
            not exist or cannot be gated, or nothing is chosen.
    """
    settings = _settings(moe)
    num_targets = _num_targets(detector, settings["aux_target"], num_groups)
    embedding = build_part(
        settings["embedding"],
        "ShallowEmbedding",
        "channels.embedding",
        offer=dict(embed_dims=num_targets),
    )
    if settings["aux_weight"] > 0.0 and embedding.embed_dims != num_targets:
        raise ConfigError(
            f"moe.channels.embedding.embed_dims is {embedding.embed_dims}, but the "
            f"auxiliary loss tells {num_targets} {settings['aux_target']} apart; leave "
            "embed_dims out, or set aux_weight=0."
        )
    context = ChannelContext()
    channels: dict[str, int] = {}
    mount = dict(context=context, skip_closed=settings["skip_closed"])
    for part, chosen in _chosen(layers_of(moe)):
        gate = _gate_backbone if part == "backbone" else _gate_transformer
        channels.update(gate(detector, part, chosen, **mount))
    try:
        path = GatingPath(embedding, channels, init=settings["gate_init"])
    except ValueError as error:
        raise ConfigError(f"moe.channels.gate_init: {error}") from error
    if settings["frozen"]:
        path.freeze()
    gating = ChannelGating(
        path,
        context=context,
        l1_weight=settings["l1_weight"],
        aux_weight=settings["aux_weight"],
        aux_target=settings["aux_target"],
    )
    parameters = sum(p.numel() for p in gating.parameters())
    return gating, ChannelReport(channels, parameters, path.frozen)


def _settings(moe: Mapping[str, Any]) -> dict[str, Any]:
    """``moe.channels`` with its defaults, checked."""
    for key in moe:
        if key not in ("layers", "channels"):
            raise ConfigError(
                f"moe.channels has no experts and no use for moe.{key}; keep layers "
                "and channels, or remove channels."
            )
    channels = moe["channels"]
    if not isinstance(channels, Mapping):
        raise ConfigError(f"moe.channels must be a dict, got {channels!r}.")
    for key in channels:
        if key not in FIELDS:
            raise ConfigError(
                f"moe.channels has the unknown key {key!r}; {did_you_mean(key, FIELDS)}"
            )
    settings: dict[str, Any] = dict(
        embedding=None,
        gate_init="uniform",
        l1_weight=1e-3,
        aux_weight=1.0,
        aux_target="classes",
        frozen=False,
        skip_closed=True,
    )
    settings.update(channels)
    for key in ("l1_weight", "aux_weight"):
        value = settings[key]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (value >= 0.0 and math.isfinite(value)):
            raise ConfigError(
                f"moe.channels.{key} must be a number of 0 or more, got {value!r}."
            )
    for key in ("frozen", "skip_closed"):
        if not isinstance(settings[key], bool):
            raise ConfigError(
                f"moe.channels.{key} must be True or False, got {settings[key]!r}."
            )
    return settings


def _num_targets(detector: Any, target: Any, num_groups: int | None) -> int:
    """How many things the auxiliary loss tells apart."""
    if target not in TARGETS:
        raise ConfigError(
            f"moe.channels.aux_target must be one of {list(TARGETS)}, got {target!r}."
        )
    if target == "classes":
        return detector.bbox_head.num_classes
    if num_groups is None:
        raise ConfigError(
            "moe.channels.aux_target is 'datasets', but there is no mixture to take "
            "the dataset groups from; use 'classes', or train on a MixtureDataset."
        )
    return num_groups


def _chosen(layers: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Parts of the detector and what is chosen of them."""
    for part in layers:
        if part not in GATED_PARTS:
            raise ConfigError(
                f"moe.layers has the unknown part {part!r}; "
                f"{did_you_mean(part, GATED_PARTS)}"
            )
    found = [
        (part, layers[part])
        for part in GATED_PARTS
        if layers.get(part) not in (None, [], ())
    ]
    if not found:
        raise ConfigError(
            "moe.layers chooses no layer, so the detector would stay dense; set "
            "layers=dict(backbone=[2, 3]), or moe=None for a dense detector."
        )
    return found


def _gate_backbone(
    detector: nn.Module, part: str, chosen: Any, **mount: Any
) -> dict[str, int]:
    """Gate the blocks of chosen stages; returns channels by layer."""
    backbone = detector.backbone
    if not isinstance(backbone, ResNet):
        raise ConfigError(
            f"moe.layers.backbone: model.backbone is a {type(backbone).__name__}; "
            "channels of mmdet's ResNet can be gated. Choose encoder or decoder."
        )
    channels: dict[str, int] = {}
    for stage in backbone_stages(chosen, len(backbone.res_layers)):
        blocks = getattr(backbone, backbone.res_layers[stage])
        for number, block in enumerate(blocks):
            gated = GatedResidualBlock(block, name=f"{part}.{stage}.{number}", **mount)
            blocks[number] = gated
            channels.update(gated.channels)
    return channels


def _gate_transformer(
    detector: nn.Module, part: str, chosen: Any, **mount: Any
) -> dict[str, int]:
    """Gate the FFNs of chosen layers; returns channels by layer."""
    existing = getattr(getattr(detector, part, None), "layers", [])
    channels: dict[str, int] = {}
    for number in layer_numbers(chosen, len(existing), part):
        layer = transformer_layer(existing, part, number)
        layer.ffn = GatedFFNBlock(layer.ffn, name=f"{part}.{number}", **mount)
        channels.update(layer.ffn.channels)
    return channels
