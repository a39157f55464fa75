"""The smooth load loss of Shazeer et al. 2017, for gaussian gate noise.

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
from damex.moe.protocols import Gate
from damex.moe.record import RoutingRecord


def load_loss(
    logits_TE: Tensor, valid_T: Tensor | None = None, *, k: int, noise_std: float
) -> Tensor:
    """CV^2 over experts of Load_e = sum_t Phi((z_te - thr_t) / noise_std).

    Phi is the normal distribution function and thr_t the k-th largest logit of the
    token, so each term is the chance that fresh gaussian noise on expert e lifts it
    to the token's threshold (arXiv 1701.06538, eq. 8-11). Logits are compared with
    logits; Tutel, and with it DAMEX, compares probabilities with a logit.

    Args:
        logits_TE: Clean router logits.
        valid_T: True for tokens that count; None for all of them.
        k: Experts per token.
        noise_std: Standard deviation of the gate's noise, above 0.

    Returns:
        A scalar, 0 when balanced or without valid tokens.

    Raises:
        ValueError: If k is not in [1, E] or `noise_std` is not positive.
    """
    num_experts = logits_TE.shape[1]
    if not 1 <= k <= num_experts:
        raise ValueError(f"load_loss: k must lie in [1, E={num_experts}], got {k}")
    if not noise_std > 0.0:
        raise ValueError(f"load_loss: noise_std must be above 0, got {noise_std}")
    logits_VE = valid_logits(logits_TE, valid_T)
    threshold_V1 = torch.topk(logits_VE, k, dim=1).values[:, -1:]
    chance_VE = torch.special.ndtr((logits_VE - threshold_V1) / noise_std)
    return squared_cv(chance_VE.sum(0))


@dataclass(frozen=True, kw_only=True)
class LoadLoss:
    """`load_loss` on the record of a layer with a fixed number of routes per token.

    Attributes:
        weight: Factor in the total loss; see `ImportanceLoss.weight`.
        noise_std: The gaussian noise scale of the gate; None stands for 1/E, as in
            `TopKGate`.
        tokens: 'all' for all real tokens, 'foreground' for those on objects.
        name: Key of the loss.
    """

    needs_groups: ClassVar[bool] = False

    weight: float = 0.05
    noise_std: float | None = None
    tokens: TokenChoice = "all"
    name: str = "load"

    def __post_init__(self) -> None:
        check_tokens("LoadLoss", self.tokens)

    def check_layer(self, *, gate: Gate, num_groups: int | None) -> None:
        """Refuses a gate that gives tokens different numbers of experts.

        Args:
            gate: The layer's gate.
            num_groups: Not read.

        Raises:
            ValueError: If the gate says that its number of routes is not fixed.
        """
        del num_groups
        if not getattr(gate, "has_fixed_routes", True):
            raise ValueError(_misfit(type(gate).__name__))

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss.

        Raises:
            ValueError: If tokens differ in their number of routes, or the record lacks
                a foreground that is asked for.
        """
        k = record.assignment.routes_per_token
        if k is None:
            raise ValueError(_misfit("different numbers"))
        std = 1.0 / record.num_experts if self.noise_std is None else self.noise_std
        valid_T = counted_tokens(record, self.tokens, owner="LoadLoss")
        return load_loss(record.logits_TE, valid_T, k=k, noise_std=std)


def _misfit(got: str) -> str:
    return (
        "LoadLoss: needs a gate that gives every token the same number of experts, "
        f"such as TopKGate (with k above 1, without a capacity), got {got}; use "
        "LoadBalanceLoss or ImportanceLoss"
    )
