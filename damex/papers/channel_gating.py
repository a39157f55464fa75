"""DeepMoE in a detector of mmdet: channels gated by an embedding of the image.

Axes: B images, N tokens, D channels, C channels of a convolution or classes, H and W
height and width, E entries of the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.resnet import BasicBlock, Bottleneck
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from damex.errors import ConfigError
from damex.models.build import build_module
from damex.models.config import ChannelConfig, LayersConfig
from damex.models.context import RoutingContext
from damex.models.insertion import EXTENSIONS, InsertionReport
from damex.models.queries import image_mask_of
from damex.models.sites import chosen_layers, chosen_stages
from damex.papers.channels import (
    ChannelGates,
    GatingPath,
    active_share,
    gate_l1,
    gated_conv2d,
    gated_ffn,
    presence_loss,
)


class GatedFFNBlock(nn.Module):
    """An ``FFN`` with gated hidden channels; all tokens of an image share its gates.

    Takes over the layers under their names, so it loads an ``FFN``'s weights.

    Raises:
        ConfigError: If the activation does not map zero to zero.
    """

    skip_closed = True  # in evaluation

    def __init__(self, ffn: FFN, *, name: str, context: RoutingContext) -> None:
        super().__init__()
        _check_activation(ffn.layers[0][1], f"moe.layers: {name}")
        # Under mmcv's names, for checkpoints.
        self.layers = ffn.layers
        self.dropout_layer = ffn.dropout_layer
        self.gamma2 = ffn.gamma2
        self.name = name
        self.context = context

    @property
    def channels(self) -> dict[str, int]:
        """Number of hidden channels by the name of the block."""
        return {self.name: self.layers[0][0].out_features}

    def forward(self, query_BND: Tensor, identity_BND: Tensor | None = None) -> Tensor:
        """Run the FFN with closed hidden channels at zero."""
        (first, *activation), second, dropout = self.layers
        out_BND = gated_ffn(
            query_BND,
            self.context.layer_gates(self.name),
            first=first,
            activation=nn.Sequential(*activation),
            second=second,
            skip_closed=self.skip_closed and not self.training,
        )
        out_BND = self.dropout_layer(self.gamma2(dropout(out_BND)))
        return (query_BND if identity_BND is None else identity_BND) + out_BND


# Wang et al. 2019: both of a basic block, the first two of a bottleneck (type A). The
# last convolution of a bottleneck stays whole, but its closed inputs are skipped.
GATED_CONVS = {BasicBlock: (True, True), Bottleneck: (True, True, False)}


class GatedResidualBlock(BaseModule):
    """A residual block with gated channels; each image has its own gates.

    Takes over the layers under their names, so it loads the weights of mmdet's ResNet.
    Gates are named ``<name>.conv1`` and so on.

    Raises:
        ConfigError: If the block is of another kind or cannot be gated.
    """

    skip_closed = True  # in evaluation

    def __init__(self, block: Any, *, name: str, context: RoutingContext) -> None:
        _check(block, name)
        super().__init__(block.init_cfg)
        for child, module in block.named_children():
            self.add_module(child, module)
        self.name = name
        self.context = context
        gated = GATED_CONVS[type(block)]
        self._steps: list[tuple[str, str, bool]] = [
            (f"conv{n}", str(getattr(block, f"norm{n}_name")), is_gated)
            for n, is_gated in enumerate(gated, start=1)
        ]

    @property
    def norm2(self) -> nn.Module:
        """Second norm; mmdet zero-initializes the last norm of a block."""
        return getattr(self, self._steps[1][1])

    @property
    def norm3(self) -> nn.Module:
        """Third norm, of a bottleneck."""
        return getattr(self, self._steps[2][1])

    @property
    def channels(self) -> dict[str, int]:
        """Number of channels of each gated convolution by its full name."""
        return {
            f"{self.name}.{conv}": getattr(self, conv).out_channels
            for conv, _, is_gated in self._steps
            if is_gated
        }

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Run mmdet's block with closed channels at zero."""
        out_BCHW, in_gates_BC = x_BCHW, None
        last = self._steps[-1][0]
        for conv, norm, is_gated in self._steps:
            gates_BC = None
            if is_gated:
                gates_BC = self.context.layer_gates(f"{self.name}.{conv}")
            out_BCHW = gated_conv2d(
                out_BCHW,
                gates_BC,
                conv=getattr(self, conv),
                norm=getattr(self, norm),
                activation=None if conv == last else self.relu,
                in_gates_BC=in_gates_BC,
                skip_closed=self.skip_closed and not self.training,
            )
            in_gates_BC = gates_BC
        downsample = getattr(self, "downsample", None)
        identity_BCHW = x_BCHW if downsample is None else downsample(x_BCHW)
        return self.relu(out_BCHW + identity_BCHW)


def _check(block: Any, name: str) -> None:
    if type(block) not in GATED_CONVS:
        known = " and ".join(_kind(block_type) for block_type in GATED_CONVS)
        raise ConfigError(
            f"moe.layers.backbone: {name} is a {_kind(type(block))}; channels of "
            f"mmdet's {known} can be gated (listed twice, or gated already?)."
        )
    if block.with_cp:
        raise ConfigError(
            f"model.backbone.with_cp runs {name} a second time without its gates; set "
            "with_cp=False."
        )
    if getattr(block, "with_plugins", False):
        raise ConfigError(
            f"model.backbone.plugins: {name} has a plugin, which would see closed "
            "channels; gate stages without plugins."
        )
    for number, is_gated in enumerate(GATED_CONVS[type(block)], start=1):
        conv, norm = getattr(block, f"conv{number}"), getattr(block, f"norm{number}")
        where = f"moe.layers.backbone: {name}.conv{number}"
        check_gateable(conv, norm, where)
        if is_gated:
            _check_activation(block.relu, where)


def check_gateable(conv: nn.Module, norm: nn.Module, where: str) -> None:
    """Raise ConfigError for layers whose closed channels cannot be skipped."""
    if (
        type(conv) is not nn.Conv2d  # a subclass may change its kernel
        or conv.groups != 1
        or conv.padding_mode != "zeros"
        or isinstance(conv.padding, str)
    ):
        raise ConfigError(
            f"{where}: gated channels need a Conv2d with groups=1 and zero padding "
            f"given in numbers, got {conv}."
        )
    per_channel = isinstance(norm, _BatchNorm) and norm.running_mean is not None
    if not per_channel and not isinstance(norm, nn.Identity):
        raise ConfigError(
            f"{where}: gated channels need a batch norm with running statistics, as "
            f"other norms mix the channels of an image, got {norm}."
        )


def _check_activation(activation: nn.Module, where: str) -> None:
    if activation(torch.zeros(1)).item() != 0.0:
        raise ConfigError(
            f"{where}: a closed channel must stay zero after the activation, but "
            f"{activation} of 0 is not 0."
        )


def _kind(block_type: type) -> str:
    """Return a class with its module: other ResNets have a Bottleneck, too."""
    return f"{block_type.__module__.rsplit('.', 1)[-1]}.{block_type.__name__}"


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
        self, gates: ChannelGates, samples: Sequence[Any], group_ids_B: Tensor
    ) -> dict[str, Tensor]:
        """Compute the losses of one step for mmdet's loss dict.

        ``group_ids_B`` is -1 where unknown.

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
            present_BE = torch.zeros_like(gates.logits_BE, dtype=torch.bool)
            for image, sample in enumerate(samples):
                if self.settings.aux_target == "classes":
                    present_BE[image, sample.gt_instances.labels] = True
                else:
                    group = group_ids_B[image]
                    present_BE[image, group.clamp(min=0)] = group >= 0
            loss = presence_loss(gates.logits_BE, present_BE)
            result["loss_moe_embedding"] = self.settings.aux_weight * loss
        return result


def insert_channels(
    detector: Any,
    layers: LayersConfig,
    settings: ChannelConfig,
    *,
    context: RoutingContext,
    num_groups: int | None,
) -> tuple[ChannelGating, InsertionReport]:
    """Gate the channels of chosen layers; return their gating path and a report.

    The detector has to register the path. ``num_groups`` is None outside of a mixture.

    Raises:
        ConfigError: If a layer does not exist or cannot be gated.
    """
    embedding = _build_embedding(detector, settings, num_groups)
    channels: dict[str, int] = {}
    for component, chosen in layers.chosen.items():
        if component == "backbone":
            for stage, layer in chosen_stages(detector, chosen):
                blocks = getattr(detector.backbone, layer)
                for number, block in enumerate(blocks):
                    name = f"backbone.{stage}.{number}"
                    blocks[number] = GatedResidualBlock(
                        block, name=name, context=context
                    )
                    channels.update(blocks[number].channels)
            continue
        for name, layer in chosen_layers(detector, component, chosen):
            layer.ffn = GatedFFNBlock(layer.ffn, name=name, context=context)
            channels.update(layer.ffn.channels)
    try:
        path = GatingPath(embedding, channels, init=settings.gate_init)
    except ValueError as error:
        raise ConfigError(f"moe.channels.gate_init: {error}") from error
    if settings.frozen:
        path.freeze()
    gating = ChannelGating(path, settings)
    parameters = sum(p.numel() for p in gating.parameters())
    state = ", frozen: load the gates of stage 1" if path.frozen else ""
    title = (
        f"gates on {sum(channels.values()):,} channels of {len(channels)} layers "
        f"({parameters:,} parameters more{state}):"
    )
    rows = (f"{name}: {count} channels" for name, count in channels.items())
    return gating, InsertionReport(tuple(rows), title=title)


def _build_embedding(
    detector: Any, settings: ChannelConfig, num_groups: int | None
) -> Any:
    """Build the embedding, with one entry per target of the auxiliary loss."""
    if settings.aux_target == "classes":
        num_targets = detector.bbox_head.num_classes
    elif num_groups is not None:
        num_targets = num_groups
    else:
        raise ConfigError(
            "moe.channels.aux_target is 'datasets', but there is no mixture to take "
            "the dataset groups from; use 'classes', or train on a MixtureDataset."
        )
    embedding = build_module(
        settings.embedding, "channels.embedding", offer=dict(embed_dims=num_targets)
    )
    if settings.aux_weight > 0.0 and embedding.embed_dims != num_targets:
        raise ConfigError(
            f"moe.channels.embedding.embed_dims is {embedding.embed_dims}, but the "
            f"auxiliary loss has {num_targets} {settings.aux_target}; leave embed_dims "
            "out, or set aux_weight=0."
        )
    return embedding


EXTENSIONS["channels"] = insert_channels
