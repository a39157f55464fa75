"""The importance loss of Shazeer et al. 2017.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from damex.moe.losses.reductions import squared_cv, valid_logits
from damex.moe.losses.token_choice import TokenChoice, check_tokens, counted_tokens
from damex.moe.record import RoutingRecord


def importance_loss(logits_TE: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """CV^2 over experts of I_e = sum_t p_te (arXiv 1701.06538, eq. 6-7; V-MoE).

    Args:
        logits_TE: Clean router logits.
        valid_T: True for tokens that count; None for all of them.

    Returns:
        A scalar: 0 when balanced or without valid tokens, E - 1 when one expert has
        all the probability.
    """
    probs_VE = torch.softmax(valid_logits(logits_TE, valid_T), dim=1)
    return squared_cv(probs_VE.sum(0))


@dataclass(frozen=True, kw_only=True)
class ImportanceLoss:
    """`importance_loss` on the record of a layer.

    Attributes:
        weight: Factor in the total loss. DAMEX's vanilla MoE baseline weights the mean
            of importance and load by 0.1, so 0.05 each, on foreground tokens.
        tokens: 'all' for all real tokens, 'foreground' for those on objects.
        name: Key of the loss.
    """

    needs_groups: ClassVar[bool] = False

    weight: float = 0.05
    tokens: TokenChoice = "all"
    name: str = "importance"

    def __post_init__(self) -> None:
        check_tokens("ImportanceLoss", self.tokens)

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss.

        Raises:
            ValueError: If the record lacks a foreground that is asked for.
        """
        valid_T = counted_tokens(record, self.tokens, owner="ImportanceLoss")
        return importance_loss(record.logits_TE, valid_T)
