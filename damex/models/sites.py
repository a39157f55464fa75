"""Which transformer layers and stages of a backbone ``moe.layers`` chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import ResNet
from torch import nn

from damex.errors import ConfigError
from damex.models.blocks import MoEPatchConv

__all__ = [
    "ConvSite",
    "backbone_stages",
    "chosen_layers",
    "conv_sites",
]


def chosen_layers(
    detector: nn.Module, component: str, chosen: Any
) -> Iterator[tuple[str, Any]]:
    """Name and module of the transformer layers that the config chooses.

    Args:
        detector: A built detector.
        component: ``encoder`` or ``decoder``.
        chosen: List of layer numbers, 'all' or 'even'.

    Raises:
        ConfigError: If a layer does not exist, is run a second time by gradient
            checkpointing of mmdet, or has no FFN.
    """
    existing = getattr(getattr(detector, component, None), "layers", [])
    count = len(existing)
    for number in _numbers(chosen, count):
        if type(number) is not int or not 0 <= number < count:
            raise ConfigError(
                f"moe.layers.{component} names layer {number!r}, but the {component} "
                f"has {count} layers: 0 to {count - 1}."
            )
        layer = existing[number]
        if "forward" in vars(layer):
            raise ConfigError(
                f"model.{component}.num_cp of mmdet wraps layer {number}, which would "
                "run its experts a second time without what they need; use a detector "
                "of damex (type='MoEDINO' and so on), or set num_cp=0 and "
                "moe.with_cp=True."
            )
        if not isinstance(getattr(layer, "ffn", None), FFN):
            raise ConfigError(
                f"moe.layers.{component}: layer {number} ({type(layer).__name__}) has "
                "no mmcv FFN in its attribute 'ffn' (listed twice, or replaced "
                "already?)."
            )
        yield f"{component}.{number}", layer


def backbone_stages(chosen: Any, count: int) -> Sequence[int]:
    """Stage numbers behind a choice.

    Args:
        chosen: List of stage numbers, 'all', 'even' or 'last'.
        count: How many stages the backbone has.

    Raises:
        ConfigError: If a stage does not exist.
    """
    numbers = _numbers(chosen, count)
    for number in numbers:
        if type(number) is not int or not 0 <= number < count:
            raise ConfigError(
                f"moe.layers.backbone names stage {number!r}, but the backbone has "
                f"{count} stages: 0 to {count - 1}."
            )
    return numbers


def _numbers(chosen: Any, count: int) -> Sequence[Any]:
    words = {"all": range(count), "even": range(0, count, 2), "last": [count - 1]}
    return words[chosen] if isinstance(chosen, str) else chosen


CONVOLUTION = "conv2"  # the last 3x3 convolution of both of ResNet's blocks


@dataclass(frozen=True)
class ConvSite:
    """A convolution that experts can replace."""

    name: str
    block: nn.Module
    conv: nn.Conv2d

    def replace(self, module: nn.Module) -> None:
        """Put a module in its place."""
        setattr(self.block, CONVOLUTION, module)


def conv_sites(detector: nn.Module, chosen: Any) -> Iterator[ConvSite]:
    """Find the last 3x3 convolution of chosen stages of a ResNet.

    Args:
        detector: A built detector.
        chosen: List of stage numbers, counted from 0 as in ``out_indices``, or
            ``'all'``, ``'even'`` or ``'last'``.

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
    for stage in backbone_stages(chosen, len(backbone.res_layers)):
        yield _site(backbone, stage)


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
