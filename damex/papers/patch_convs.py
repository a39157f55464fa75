"""pMoE in a ResNet of mmdet: convolutions whose experts choose patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from damex.errors import ConfigError
from damex.models.blocks import MoEBlock
from damex.models.build import build_layer
from damex.models.config import BlockConfig, MoEConfig
from damex.models.context import RoutingContext
from damex.models.insertion import INSERTERS, report_row
from damex.models.sites import chosen_stages
from damex.models.starts import ROUTED, Start
from damex.moe import Packing
from damex.papers.patches import PatchConvExperts, real_patches, route_patches


class MoEPatchConv(MoEBlock):
    """A convolution whose output channels are split among experts.

    Patches without an expert are zero here and keep the block's identity path. From a
    dense convolution each expert starts as its slice of the output channels.
    """

    def starts(self, state: Mapping[str, Any], prefix: str) -> dict[str, Start]:
        """Return the start from the kernel of a dense convolution."""
        key, kernel = f"{prefix}weight", state.get(f"{prefix}weight")
        own = cast(PatchConvExperts, self.moe.experts).weight_EOCKK
        if kernel is None or kernel.shape != own.flatten(0, 1).shape:
            return {}  # the loader reports the keys that do not fit
        # An expert gets its part of the output channels of the kernel or its moment.
        start = Start(key, lambda kernel, own, kind: kernel.reshape(own.shape))
        return {f"{ROUTED}weight_EOCKK": start}

    def forward(self, map_BCHW: Tensor) -> Tensor:
        """Convolve the chosen patches; height and width stay the same."""
        size = (map_BCHW.shape[2], map_BCHW.shape[3])
        ratio_B2 = self.context.valid_ratio_B2
        packing = None
        if ratio_B2 is not None:
            experts = cast(PatchConvExperts, self.moe.experts)
            mask_BN = real_patches(ratio_B2, size, experts.patch_size)
            packing = Packing.of_mask(mask_BN)
        route = partial(
            route_patches,
            self.moe,
            packing=packing,
            group_ids_B=self.context.group_ids_B,
            earlier_votes_BG=self.context.votes_BG,
        )
        out_BFHW, record = self._run(route, map_BCHW)
        self.context.add(self.name, record)
        return out_BFHW


def insert_patch_convs(
    detector: nn.Module,
    config: MoEConfig,
    *,
    context: RoutingContext,
    num_groups: int | None,
) -> Iterator[str]:
    """Replace the selected convolutions; yield a line of the report for each.

    Raises:
        ConfigError: If other layers are selected, or an option is for FFNs only.
    """
    kind = config.experts["type"]
    if [*config.layers.chosen] != ["backbone"]:
        raise ConfigError(
            f"moe.experts has the type {kind!r}, which replaces convolutions; set "
            f"moe.layers=dict(backbone=[3]) or 'last', got {config.layers.chosen}."
        )
    for field in ("shared_expert", "upcycling", "block"):
        if getattr(config, field) not in (None, BlockConfig()):
            raise ConfigError(
                f"moe.{field} is for FFNs and cannot be combined with {kind!r}, whose "
                "experts are parts of a convolution; leave it out."
            )
    for name, residual in conv_sites(detector, config.layers.backbone):
        conv = residual.conv2
        channels = dict(in_channels=conv.in_channels, out_channels=conv.out_channels)
        side = conv.kernel_size[0]
        moe = build_layer(
            config, dict(**channels, kernel_size=side), num_groups=num_groups
        )
        residual.conv2 = block = MoEPatchConv(
            moe, name=name, context=context, with_cp=config.with_cp
        )
        widths = f"{conv.in_channels}-{conv.out_channels}"
        yield report_row(block, conv, f"convolution {widths} {side}x{side}")


def conv_sites(detector: Any, chosen: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and block of the selected ``conv2``, the last 3x3 of a stage.

    Raises:
        ConfigError: If the backbone is not a ResNet, a stage does not exist, or its
            last block cannot take experts.
    """
    for stage, layer in chosen_stages(detector, chosen):
        backbone, blocks = detector.backbone, getattr(detector.backbone, layer)
        block, where = blocks[-1], f"moe.layers.backbone: stage {stage}"
        if stage < backbone.frozen_stages:
            raise ConfigError(
                f"{where} is frozen by model.backbone.frozen_stages="
                f"{backbone.frozen_stages}; choose a later stage, or set "
                f"frozen_stages={stage} or less."
            )
        if block.with_cp:
            raise ConfigError(
                f"{where} is recomputed by model.backbone.with_cp, which would run its "
                "experts a second time without their inputs; set with_cp=False there "
                "and moe.with_cp=True."
            )
        conv = block.conv2
        is_plain = type(conv) is nn.Conv2d
        sizes = (*conv.stride, *conv.dilation, conv.groups) if is_plain else ()
        if sizes != (1, 1, 1, 1, 1):
            raise ConfigError(
                f"{where}: experts can replace a plain convolution of stride 1 only, "
                f"but its last block has {conv if is_plain else type(conv).__name__} "
                "(listed twice?)."
            )
        yield f"backbone.{layer}.{len(blocks) - 1}.conv2", block


INSERTERS[PatchConvExperts] = insert_patch_convs
