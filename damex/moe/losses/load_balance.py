"""The load balance loss of GShard and Switch Transformer.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from damex.moe.assignment import Assignment
from damex.moe.losses.reductions import valid_logits
from damex.moe.losses.token_choice import TokenChoice, check_tokens, counted_tokens
from damex.moe.record import RoutingRecord

SCORES = ("probability", "logit")


def load_balance_loss(
    logits_TE: Tensor,
    counts_E: Tensor,
    valid_T: Tensor | None = None,
    *,
    scores: Literal["probability", "logit"] = "probability",
) -> Tensor:
    """E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961, eq. 4-6).

    f_e is the share of all routes that go to expert e (no gradient), P_e the mean
    probability of e. The value is 1 when either of them is uniform, and E when
    everything goes to one expert. (1 is where descent leads, not a bound: f and P that
    disagree can give less.)

    Args:
        logits_TE: Clean router logits.
        counts_E: Routes of each expert.
        valid_T: True for tokens that count; None for all of them.
        scores: 'logit' for the mean logit in the place of P_e, as in the released code
            of Chen et al. 2022 for synthetic data; there is no lower bound then.

    Returns:
        A scalar, 0 when there is no valid token.
    """
    scores_VE = valid_logits(logits_TE, valid_T)
    if scores == "probability":
        scores_VE = torch.softmax(scores_VE, dim=1)
    score_E = scores_VE.sum(0) / max(scores_VE.shape[0], 1)
    fraction_E = counts_E.to(score_E.dtype) / counts_E.sum().clamp_min(1)
    return counts_E.shape[0] * (fraction_E * score_E).sum()


@dataclass(frozen=True, kw_only=True)
class LoadBalanceLoss:
    """`load_balance_loss` on the record of a layer.

    It acts on gates whose load can be uneven. Where each expert has the same load, it
    is 1 whatever the router says and has no gradient (with scores='logit' it does not
    even out anything either): with `DenseSoftmaxGate`; with `ExpertChoiceGate`, unless
    tokens='foreground'; and with `DenseToSparseGate` as long as it drops no weight.

    Attributes:
        weight: Factor in the total loss; 0.01 in Switch Transformer.
        tokens: 'all' for all real tokens, 'foreground' for those on objects.
        name: Key of the loss.
        scores: See `load_balance_loss`.
    """

    needs_groups: ClassVar[bool] = False

    weight: float = 0.01
    tokens: TokenChoice = "all"
    name: str = "load_balance"
    scores: Literal["probability", "logit"] = "probability"

    def __post_init__(self) -> None:
        check_tokens("LoadBalanceLoss", self.tokens)
        if self.scores not in SCORES:
            raise ValueError(
                f"LoadBalanceLoss: unknown scores {self.scores!r}; use one of {SCORES}"
            )

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss; routes that found no place count as well.

        Raises:
            ValueError: If the record lacks a foreground that is asked for.
        """
        valid_T = counted_tokens(record, self.tokens, owner="LoadBalanceLoss")
        counts_E = _counts(record.assignment, valid_T)
        if record.assignment.dropped is not None:
            counts_E = counts_E + _counts(record.assignment.dropped, valid_T)
        return load_balance_loss(
            record.logits_TE, counts_E, valid_T, scores=self.scores
        )


def _counts(routes: Assignment, valid_T: Tensor | None) -> Tensor:
    """Routes of each expert that start at counted tokens."""
    if valid_T is None:
        return routes.counts_E
    counted_R = valid_T.index_select(0, routes.token_index_R).to(routes.counts_E.dtype)
    zeros_E = torch.zeros_like(routes.counts_E)
    return zeros_E.scatter_add(0, routes.expert_index_R, counted_R)
