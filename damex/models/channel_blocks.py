"""mmcv's FFN and mmdet's residual blocks with gated channels."""

from __future__ import annotations

from typing import Any

from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.resnet import BasicBlock, Bottleneck
from mmengine.model import BaseModule
from torch import Tensor, nn

from damex.errors import ConfigError
from damex.models.context import RoutingContext
from damex.moe import check_activation, check_gateable, gated_conv2d, gated_ffn


class GatedFFNBlock(nn.Module):
    """An ``FFN`` with gated hidden channels; all tokens of an image share its gates.

    Takes over the layers under their names, so it loads an ``FFN``'s weights.
    ``skip_closed`` skips closed channels in evaluation.

    Raises:
        ConfigError: If the activation does not map zero to zero.
    """

    def __init__(
        self, ffn: FFN, *, name: str, context: RoutingContext, skip_closed: bool = True
    ) -> None:
        super().__init__()
        try:
            check_activation(ffn.layers[0][1])
        except ValueError as error:
            raise ConfigError(f"moe.layers: {name}: {error}") from error
        # Under mmcv's names, for checkpoints.
        self.layers = ffn.layers
        self.dropout_layer = ffn.dropout_layer
        self.gamma2 = ffn.gamma2
        self.name = name
        self.context = context
        self.skip_closed = skip_closed

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
    Gates are named ``<name>.conv1`` and so on. ``skip_closed`` skips closed channels in
    evaluation.

    Raises:
        ConfigError: If the block is of another kind or cannot be gated.
    """

    def __init__(
        self,
        block: Any,
        *,
        name: str,
        context: RoutingContext,
        skip_closed: bool = True,
    ) -> None:
        _check(block, name)
        super().__init__(block.init_cfg)
        for child, module in block.named_children():
            self.add_module(child, module)
        self.name = name
        self.context = context
        self.skip_closed = skip_closed
        gated = GATED_CONVS[type(block)]
        self._steps: list[tuple[str, str, bool]] = [
            (f"conv{n}", str(getattr(block, f"norm{n}_name")), is_gated)
            for n, is_gated in enumerate(gated, start=1)
        ]

    @property
    def norm2(self) -> nn.Module:
        """Second norm; mmdet zero-initializes the last norm of a block."""
        return self._norm(2)

    @property
    def norm3(self) -> nn.Module:
        """Third norm, of a bottleneck."""
        return self._norm(3)

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
            gates_BC = self._gates(conv) if is_gated else None
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

    def _gates(self, conv: str) -> Tensor:
        return self.context.layer_gates(f"{self.name}.{conv}")

    def _norm(self, number: int) -> nn.Module:
        return getattr(self, self._steps[number - 1][1])


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
        try:
            check_gateable(conv, norm, block.relu if is_gated else None)
        except ValueError as error:
            raise ConfigError(
                f"moe.layers.backbone: {name}.conv{number}: {error}"
            ) from error


def _kind(block_type: type) -> str:
    """Return a class with its module: other ResNets have a Bottleneck, too."""
    return f"{block_type.__module__.rsplit('.', 1)[-1]}.{block_type.__name__}"
