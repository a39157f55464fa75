"""Expert choice: in every image each expert takes the tokens it scores highest.

Axes: B images, N tokens per image (padding included), V real tokens, E experts, R
routes (token-expert pairs), L tokens that an expert can take from an image.
"""

from __future__ import annotations

import math
import sys
from typing import Literal

import torch
from torch import Tensor

from damex.errors import check_choice, check_number, check_sizes
from damex.moe.gates import Gate
from damex.moe.routing import Assignment, Packing

WEIGHTS = ("selected", "all", "one")
# 0.07 * 100 is 7.000000000000001 in float64 and must stay 7 tokens.
ROUNDING = 1e-9


class ExpertChoiceGate(Gate):
    """pMoE (Chowdhury et al. 2023, arXiv 2306.04073), also Zhou et al. 2022.

    Every expert takes the same number l of tokens from every image, so the load is
    balanced without a loss; a token may get several experts (their outputs add up) or
    none (its block is the identity). Ties go to the earlier token.

    Images are independent, and padding is neither taken nor counted. As experts choose
    among the tokens of an image, a token's result depends on all others of its image,
    even those that an attention mask hides from it: damex rejects this gate in decoders
    whose denoising queries exist in training only (DINO).

    Args:
        num_tokens: l for every image; an image with fewer real tokens gives all. Set
            either this or `share`.
        share: l as a share of the real tokens of the image, in (0, 1], rounded up.
        weights: 'selected' for a softmax over the l tokens of the expert (eq. 4 of the
            paper), 'all' for one over all real tokens of the image (the released code
            for wide residual networks), 'one' for 1 (eq. 3, a separately trained
            router, which gets no gradient from the output).
        mean_one: Multiply the weights by the number of tokens of the softmax, so that
            their mean is 1, the scale that pretrained experts and frozen batch norms
            expect.
    """

    compares_tokens = True

    def __init__(
        self,
        *,
        num_tokens: int | None = None,
        share: float | None = None,
        weights: Literal["selected", "all", "one"] = "selected",
        mean_one: bool = False,
    ) -> None:
        super().__init__()
        if (num_tokens is None) == (share is None):
            raise ValueError(
                "ExpertChoiceGate: set one of num_tokens and share, got "
                f"{num_tokens} and {share}"
            )
        if num_tokens is not None:
            check_sizes("ExpertChoiceGate", num_tokens=num_tokens)
        check_number("ExpertChoiceGate", "in (0, 1]", share=share)
        check_choice("ExpertChoiceGate", WEIGHTS, weights=weights)
        if weights == "one" and mean_one:
            raise ValueError(
                "ExpertChoiceGate: weights='one' have mean 1; leave mean_one out"
            )
        self.num_tokens = num_tokens
        self.share = share
        self.weights = weights
        self.mean_one = mean_one

    @property
    def has_fixed_routes(self) -> bool:
        """False: a token may have any number of experts."""
        return False

    @property
    def has_constant_weights(self) -> bool:
        """True for weights='one'."""
        return self.weights == "one"

    def has_even_load(self, tokens: str) -> bool:
        """True for all tokens; a subset of them may be uneven."""
        return tokens == "all"

    def forward(self, logits_VE: Tensor, packing: Packing | None = None) -> Assignment:
        """Choose l routes for each expert and image."""
        num_tokens, num_experts = logits_VE.shape
        if packing is None:
            packing = Packing(1, num_tokens)
        # Finite: the softmax of a row of -inf is NaN.
        lowest = torch.finfo(logits_VE.dtype).min
        scores_BEN = packing.unpack(logits_VE, fill=lowest).transpose(1, 2)
        row_V = torch.arange(num_tokens, device=logits_VE.device)
        row_BN = packing.unpack(row_V, fill=-1)
        real_B = (row_BN >= 0).sum(1)
        order_BEN = torch.sort(scores_BEN, dim=-1, descending=True, stable=True)[1]
        # num_tokens limits a share of 1; a share has no limit.
        share, limit = self.share or 1.0, self.num_tokens or sys.maxsize
        # L is l of an image without padding, which needs no synchronization.
        most = min(math.ceil(share * packing.num_tokens - ROUNDING), limit)
        # pMoE, section 3.1: J_s has the l patches of largest g_js = <w_s, x_j>.
        pick_BEL = order_BEN[..., :most]
        rank_L = torch.arange(pick_BEL.shape[-1], device=logits_VE.device)
        wanted_B = torch.ceil(real_B.double() * share - ROUNDING).long()
        quota_B = wanted_B.clamp_max(limit)
        taken_BL = rank_L < quota_B.unsqueeze(1)
        taken_BEL = taken_BL.unsqueeze(1).expand(-1, num_experts, -1)
        weight_BEL = self._weigh(scores_BEN, pick_BEL, taken_BEL)
        if self.mean_one:
            over_B = real_B if self.weights == "all" else quota_B
            weight_BEL = weight_BEL * over_B.view(-1, 1, 1)
        expert_E1 = torch.arange(num_experts, device=logits_VE.device).view(-1, 1)
        columns = (
            row_BN.unsqueeze(1).expand_as(scores_BEN).gather(-1, pick_BEL),
            expert_E1.expand_as(pick_BEL),
            weight_BEL,
        )
        # Without padding all picks are taken, without synchronization.
        token_R, expert_R, weight_R = (
            column.flatten() if packing.position_V is None else column[taken_BEL]
            for column in columns
        )
        return Assignment.from_pairs(
            token_R, expert_R, weight_R, num_tokens=num_tokens, num_experts=num_experts
        )

    def _weigh(self, scores_BEN: Tensor, pick_BEL: Tensor, taken_BEL: Tensor) -> Tensor:
        """Return the weights of the picks; those of picks not taken are meaningless."""
        if self.weights == "all":
            # Released code for wide residual networks: softmax over all n, then J_s.
            return torch.softmax(scores_BEN, dim=-1).gather(-1, pick_BEL)
        picked_BEL = scores_BEN.gather(-1, pick_BEL)
        if self.weights == "one":
            # pMoE, eq. 3: G_js = 1.
            return torch.ones_like(picked_BEL)
        lowest = torch.finfo(picked_BEL.dtype).min
        # pMoE, eq. 4: G_js = exp(g_js) / sum over i in J_s of exp(g_is).
        return picked_BEL.masked_fill(~taken_BEL, lowest).softmax(-1)
