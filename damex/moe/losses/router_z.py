"""The router z-loss of ST-MoE.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from damex.moe.losses.reductions import mean_over_tokens, valid_logits
from damex.moe.record import RoutingRecord


def router_z_loss(logits_TE: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """Mean over tokens of logsumexp(z_t)^2 (ST-MoE, arXiv 2202.08906, eq. 5).

    Keeps logits small, so that rounding matters less.

    Args:
        logits_TE: Clean router logits.
        valid_T: True for tokens that count; None for all of them.

    Returns:
        A scalar, 0 when there is no valid token.
    """
    logits_VE = valid_logits(logits_TE, valid_T)
    return mean_over_tokens(torch.logsumexp(logits_VE, dim=1).square())


@dataclass(frozen=True, kw_only=True)
class RouterZLoss:
    """`router_z_loss` on the record of a layer.

    Attributes:
        weight: Factor in the total loss; 0.001 in ST-MoE.
        name: Key of the loss.
    """

    needs_groups: ClassVar[bool] = False

    weight: float = 0.001
    name: str = "router_z"

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss."""
        return router_z_loss(record.logits_TE, record.token_mask_T)
