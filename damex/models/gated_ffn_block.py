"""GatedFFNBlock: mmcv's ``FFN`` with gated hidden channels."""

from __future__ import annotations

from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor, nn

from damex.errors import ConfigError
from damex.models.channel_context import ChannelContext
from damex.moe import gated_ffn
from damex.moe.channels import check_activation

__all__ = ["GatedFFNBlock"]


class GatedFFNBlock(nn.Module):
    """Takes over the layers of an ``FFN``, under their names, and gates them.

    So the block loads what an ``FFN`` saved, and is called like one. All tokens of an
    image share its gates.

    Args:
        ffn: With two linear layers.
        name: Where it stands, for instance ``encoder.0``.
        context: Where gates come from.
        skip_closed: Whether closed channels are left out of the computation in
            evaluation.

    Raises:
        ConfigError: If the FFN has another shape or an activation that moves zero.
    """

    def __init__(
        self, ffn: FFN, *, name: str, context: ChannelContext, skip_closed: bool = True
    ) -> None:
        super().__init__()
        if ffn.num_fcs != 2 or not ffn.add_identity:
            raise ConfigError(
                f"moe.layers: {name} is an FFN with num_fcs={ffn.num_fcs} and "
                f"add_identity={ffn.add_identity}; channels can be gated of FFNs with "
                "num_fcs=2 and add_identity=True."
            )
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
        """As mmcv's ``FFN``, with closed hidden channels at zero."""
        (first, *activation), second, dropout = self.layers
        out_BND = gated_ffn(
            query_BND,
            self.context.layer(self.name),
            first=first,
            activation=nn.Sequential(*activation),
            second=second,
            skip_closed=self.skip_closed and not self.training,
        )
        out_BND = self.dropout_layer(self.gamma2(dropout(out_BND)))
        return (query_BND if identity_BND is None else identity_BND) + out_BND
