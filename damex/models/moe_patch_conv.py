"""MoEPatchConv: experts on patches in the place of a convolution of mmdet's ResNet."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from mmdet.models.backbones import ResNet
from mmdet.registry import MODELS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from damex.errors import ConfigError
from damex.models.context import RoutingContext
from damex.models.insertion_plan import layers_of
from damex.moe import MoELayer, PatchConvExperts, real_patches, route_patches

__all__ = ["ConvSite", "MoEPatchConv", "conv_sites", "uses_patches"]

CONVOLUTION = "conv2"  # the last 3x3 convolution of both of ResNet's blocks


class MoEPatchConv(nn.Module):
    """A convolution whose output channels are shared out among experts.

    Patches that no expert took are zero here and keep what the block's identity path
    gives them. It also loads what the convolution saved: each expert then starts as its
    slice of the output channels.

    Args:
        moe: Router, gate and `PatchConvExperts`.
        name: Name of the block in records and reports.
        context: Where group ids and the extent of the images come from and records go
            to.
        with_cp: Recompute the experts in the backward pass.
    """

    def __init__(
        self,
        moe: MoELayer,
        *,
        name: str,
        context: RoutingContext,
        with_cp: bool = False,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.moe = moe
        self.name = name
        self.context = context
        self.register_load_state_dict_pre_hook(_slice_channels)

    def forward(self, map_BCHW: Tensor) -> Tensor:
        """Convolve the patches that were chosen.

        Args:
            map_BCHW: Feature map, (images, channels, height, width).

        Returns:
            Feature map of the same height and width.
        """
        size = (map_BCHW.shape[2], map_BCHW.shape[3])
        share_B2 = self.context.image_share_B2
        mask_BN = None
        if share_B2 is not None:
            experts = cast(PatchConvExperts, self.moe.experts)
            mask_BN = real_patches(share_B2, size, experts.patch_size)
        route = partial(
            route_patches,
            self.moe,
            patch_mask_BN=mask_BN,
            group_ids_B=self.context.group_ids_B,
        )
        if self.with_cp and self.training:
            out_BFHW, record = checkpoint(route, map_BCHW, use_reentrant=False)
        else:
            out_BFHW, record = route(map_BCHW)
        self.context.add(self.name, record)
        return out_BFHW


@dataclass(frozen=True)
class ConvSite:
    """A convolution that experts can replace."""

    name: str
    block: nn.Module
    conv: nn.Conv2d

    def replace(self, module: nn.Module) -> None:
        """Put a module in its place."""
        setattr(self.block, CONVOLUTION, module)


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


def conv_sites(detector: nn.Module, chosen: Any) -> Iterator[ConvSite]:
    """Find the last 3x3 convolution of chosen stages of a ResNet.

    Args:
        detector: A built detector.
        chosen: List of stage numbers, counted from 0 as in ``out_indices``, or
            ``'all'`` or ``'last'``.

    Raises:
        ConfigError: If there is no ResNet, a stage does not exist, or its last block
            cannot take experts.
    """
    backbone = getattr(detector, "backbone", None)
    if not isinstance(backbone, ResNet):
        raise ConfigError(
            "moe.layers.backbone needs a ResNet of mmdet as model.backbone, got "
            f"{type(backbone).__name__}."
        )
    for stage in _stages(chosen, len(backbone.res_layers)):
        yield _site(backbone, stage)


def _stages(chosen: Any, count: int) -> Sequence[int]:
    if chosen == "all":
        return range(count)
    if chosen == "last":
        return [count - 1]
    if not isinstance(chosen, (list, tuple)):
        raise ConfigError(
            "moe.layers.backbone must be a list of stage numbers, 'all' or 'last', "
            f"got {chosen!r}."
        )
    for number in chosen:
        if type(number) is not int or not 0 <= number < count:
            raise ConfigError(
                f"moe.layers.backbone names stage {number!r}, but the backbone has "
                f"{count} stages: 0 to {count - 1}."
            )
    return chosen


def _site(backbone: ResNet, stage: int) -> ConvSite:
    layer = backbone.res_layers[stage]
    blocks = getattr(backbone, layer)
    where = f"moe.layers.backbone: stage {stage}"
    if stage < backbone.frozen_stages:
        raise ConfigError(
            f"{where} is frozen by model.backbone.frozen_stages="
            f"{backbone.frozen_stages}; choose a later stage, or set "
            f"frozen_stages={stage} or less."
        )
    block = blocks[-1]
    if block.with_cp:
        raise ConfigError(
            f"{where} is recomputed by model.backbone.with_cp, which would run its "
            "experts a second time without what they need; set with_cp=False there and "
            "moe.with_cp=True."
        )
    conv = getattr(block, CONVOLUTION)
    obstacle = _obstacle(conv)
    if obstacle:
        raise ConfigError(
            f"{where}: experts can replace a plain convolution of stride 1 only, but "
            f"its last block has {obstacle}."
        )
    return ConvSite(f"backbone.{layer}.{len(blocks) - 1}.{CONVOLUTION}", block, conv)


def _obstacle(conv: nn.Module) -> str | None:
    """What experts cannot do of what a convolution does."""
    if isinstance(conv, MoEPatchConv):
        return "experts already (listed twice?)"
    if type(conv) is not nn.Conv2d:
        return f"a {type(conv).__name__}"
    for name in ("stride", "dilation"):
        if getattr(conv, name) != (1, 1):
            return f"{name}={getattr(conv, name)[0]}"
    return f"groups={conv.groups}" if conv.groups != 1 else None


def _slice_channels(
    block: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Turn the kernel of a dense convolution in a state dict into the experts'."""
    del rest  # what else torch hands to such a hook
    key, own = f"{prefix}weight", block.state_dict()
    target = own["moe.experts.weight_EOCKK"]
    kernel = state.get(key)
    if kernel is None or kernel.shape != target.flatten(0, 1).shape:
        return  # the loader reports the keys that do not fit
    del state[key]
    for name, tensor in own.items():
        state[prefix + name] = tensor
    state[f"{prefix}moe.experts.weight_EOCKK"] = kernel.reshape(target.shape)
