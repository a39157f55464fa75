"""Experts on patches in the place of convolutions of a backbone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from damex.models.insertion_plan import InsertionPlan
from damex.models.insertion_report import InsertedLayer, count_parameters
from damex.models.moe_patch_conv import ConvSite, MoEPatchConv, conv_sites
from damex.models.part_building import assemble_layer, build_part

__all__ = ["insert_patch_convs"]


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
