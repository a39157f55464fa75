"""The DAMEX loss: tokens of a dataset should go to the experts of that dataset.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from damex.moe.losses.record_groups import record_groups
from damex.moe.losses.reductions import valid_logits
from damex.moe.losses.token_choice import TokenChoice, check_tokens, counted_tokens
from damex.moe.record import RoutingRecord


def dataset_routing_loss(
    logits_TE: Tensor, target_mask_TE: Tensor, valid_T: Tensor | None = None
) -> Tensor:
    """Mean of -log(sum of the probabilities of a token's allowed experts).

    With one allowed expert this is the cross-entropy of DAMEX (NeurIPS 2023, arXiv
    2311.04894), L = (1/T) sum_t -log softmax(z_t)[h(d(t))]; several allowed experts
    may share a dataset's tokens as they like.

    Args:
        logits_TE: Clean router logits.
        target_mask_TE: True at the allowed experts. A row without any takes no part:
            its dataset is unknown.
        valid_T: True for tokens that count; None for all of them.

    Returns:
        A scalar in nats, 0 when no token takes part.
    """
    logits_VE = valid_logits(logits_TE, valid_T)
    if valid_T is not None:
        target_mask_TE = target_mask_TE[valid_T]
    known_V = target_mask_TE.any(dim=1)
    # A row of unknown dataset is allowed everything: its loss and gradient are 0, and
    # the host need not know which rows those are.
    allowed_VE = target_mask_TE | ~known_V.unsqueeze(1)
    log_all_V = torch.logsumexp(logits_VE, dim=1)
    log_allowed_V = torch.logsumexp(
        logits_VE.masked_fill(~allowed_VE, -torch.inf), dim=1
    )
    return (log_all_V - log_allowed_V).sum() / known_V.sum().clamp_min(1)


@dataclass(frozen=True, kw_only=True)
class DatasetRoutingLoss:
    """`dataset_routing_loss` on the record of a layer.

    Attributes:
        weight: Factor in the total loss; 0.1 in DAMEX.
        tokens: 'all' for all real tokens, 'foreground' for those on objects.
        name: Key of the loss.
    """

    needs_groups: ClassVar[bool] = True

    weight: float = 0.1
    tokens: TokenChoice = "all"
    name: str = "dataset_routing"

    def __post_init__(self) -> None:
        check_tokens("DatasetRoutingLoss", self.tokens)

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss; tokens with group id -1 are left out.

        Raises:
            ValueError: If the record has no group ids, no group-expert map, or no
                foreground where that is asked for.
        """
        ids_T, experts_GE = record_groups(record, owner="DatasetRoutingLoss")
        known_T = ids_T >= 0
        target_TE = experts_GE[ids_T.clamp_min(0)]
        valid_T = counted_tokens(record, self.tokens, owner="DatasetRoutingLoss")
        return dataset_routing_loss(
            record.logits_TE, target_TE & known_T.unsqueeze(1), valid_T
        )
