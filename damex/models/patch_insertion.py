"""Experts on patches in the place of convolutions of a backbone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from mmdet.registry import MODELS
from torch import nn

from damex.errors import ConfigError
from damex.models.conv_sites import ConvSite, conv_sites
from damex.models.insertion_plan import InsertionPlan, layers_of
from damex.models.insertion_report import InsertedLayer, count_parameters
from damex.models.moe_patch_conv import MoEPatchConv
from damex.models.part_building import assemble_layer, build_part
from damex.moe import PatchConvExperts

__all__ = ["insert_patch_convs", "uses_patches"]


def uses_patches(moe: Mapping[str, Any]) -> bool:
    """Whether the experts convolve patches, and so belong into the backbone.

    Raises:
        ConfigError: If the experts do not fit the layers that are chosen for them.
    """
    layers = layers_of(moe)
    experts = moe.get("experts") or {}
    if not isinstance(experts, Mapping):
        raise ConfigError(
            "moe.experts must be a dict with a type, such as dict(type='FFNExperts'), "
            f"got {experts!r}."
        )
    kind = experts.get("type", "FFNExperts")
    part = MODELS.get(kind) if isinstance(kind, str) else kind
    on_patches = inspect.isclass(part) and issubclass(part, PatchConvExperts)
    chosen = layers.get("backbone") not in (None, [], ())
    if chosen and not on_patches:
        raise ConfigError(
            "moe.layers.backbone needs experts that convolve patches; set moe.experts="
            f"dict(type='PatchConvExperts', patch_size=2), got the type {kind!r}."
        )
    if not on_patches:
        return False
    others = [part for part in layers if part != "backbone"]
    if others or not chosen:
        raise ConfigError(
            f"moe.experts has the type {kind!r}, which replaces convolutions; set "
            f"moe.layers=dict(backbone=[3]) or 'last', got {dict(layers)!r}."
        )
    if moe.get("shared_expert") is not None:
        raise ConfigError(
            f"moe.shared_expert is an FFN and cannot stand beside {kind!r}; leave it "
            "out."
        )
    return True


def insert_patch_convs(
    detector: nn.Module, plan: InsertionPlan
) -> Iterator[InsertedLayer]:
    """Replace the convolutions that the config chooses.

    Args:
        detector: A built detector with a ResNet of mmdet.
        plan: What to put into it.

    Yields:
        Each replaced convolution.

    Raises:
        ConfigError: If a stage does not exist or cannot take experts.
    """
    for site in conv_sites(detector, plan.moe["layers"]["backbone"]):
        block = _build_block(plan, site)
        site.replace(block)
        conv = site.conv
        side, widths = conv.kernel_size[0], f"{conv.in_channels}-{conv.out_channels}"
        yield InsertedLayer(
            name=site.name,
            dense=f"convolution {widths} {side}x{side}",
            num_experts=plan.num_experts,
            dense_parameters=count_parameters(conv),
            moe_parameters=count_parameters(block),
        )


def _build_block(plan: InsertionPlan, site: ConvSite) -> MoEPatchConv:
    conv = site.conv
    experts = build_part(
        plan.moe["experts"],
        None,
        "experts",
        num_experts=plan.num_experts,
        in_channels=conv.in_channels,
        out_channels=conv.out_channels,
        kernel_size=conv.kernel_size[0],
    )
    layer = assemble_layer(
        plan.moe,
        experts,
        embed_dims=experts.embed_dims,
        num_experts=plan.num_experts,
        groups=plan.groups,
    )
    return MoEPatchConv(
        layer, name=site.name, context=plan.context, with_cp=plan.with_cp
    )
