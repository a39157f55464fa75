"""MoEFFN: a mixture of experts in the place of mmcv's ``FFN``."""

from __future__ import annotations

from torch import Tensor, nn

from damex.models.context import RoutingContext
from damex.moe import MoELayer

__all__ = ["MoEFFN"]


class MoEFFN(nn.Module):
    """Residual MoE block that is called like mmcv's ``FFN``.

    Args:
        moe: The layer.
        name: Name of the block in records and reports, for instance ``decoder.0``.
        context: Where group ids and the token mask come from and records go to.
    """

    def __init__(self, moe: MoELayer, *, name: str, context: RoutingContext) -> None:
        super().__init__()
        self.moe = moe
        self.name = name
        self.context = context

    def forward(self, query_BND: Tensor, identity_BND: Tensor | None = None) -> Tensor:
        """Add the experts' output to the query.

        Args:
            query_BND: Tokens, (images, tokens, channels).
            identity_BND: What the output is added to; the query by default.

        Returns:
            Tokens of the same shape; padded tokens keep their residual unchanged.
        """
        output_BND, record = self.moe(
            query_BND,
            token_mask_BN=self.context.token_mask_BN,
            group_ids_B=self.context.group_ids_B,
        )
        self.context.add(self.name, record)
        return (query_BND if identity_BND is None else identity_BND) + output_BND
