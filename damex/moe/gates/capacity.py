"""Expert capacity: each expert serves so many tokens and no more.

Axes: T tokens, E experts, K experts per token, R routes (token-expert pairs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from damex.moe.assignment import Assignment

PRIORITIES = ("score", "order")


@dataclass(frozen=True, kw_only=True)
class ExpertCapacity:
    """Gives every expert k * int(factor * ceil(T / E)) places per forward.

    That is the arithmetic of Tutel 0.2.1, and with it of the released code of DAMEX; T
    counts the real tokens of the whole batch, and E the experts. Routes that find no
    place are dropped and kept apart in `Assignment.dropped`; a token without any route
    left passes the layer on its residual alone. First choices of all tokens are served
    before second ones.

    The same factor holds in evaluation. The places are shared by a batch, so with a
    capacity an image's result depends on the other images of its batch: the one option
    of this package of which that is true.

    Places are also shared by all queries of a decoder, whatever its attention mask
    hides. In training the denoising queries of DINO, which are made of the ground
    truth, take places from the matching queries; at test time there are none. The
    released code of DAMEX does the same, so the coupling is kept.

    Attributes:
        factor: Places per expert over those that perfect balance would need; above 0.
        priority: Who is served first: 'score' for tokens with the highest probability
            of their first choice (batch-priority routing of V-MoE, arXiv
            2106.05974), 'order' for tokens that come first in the batch.

    Raises:
        ValueError: If the factor is not positive or the priority is unknown.
    """

    factor: float = 1.25
    priority: Literal["score", "order"] = "score"

    def __post_init__(self) -> None:
        if not self.factor > 0.0:
            raise ValueError(
                f"ExpertCapacity: factor must be above 0, got {self.factor}"
            )
        if self.priority not in PRIORITIES:
            raise ValueError(
                f"ExpertCapacity: unknown priority {self.priority!r}; use one of "
                f"{PRIORITIES}"
            )

    def places(self, num_tokens: int, num_experts: int, *, k: int) -> int:
        """Places of each expert.

        Args:
            num_tokens: Real tokens of the batch.
            num_experts: E.
            k: Experts per token.

        Example:
            >>> ExpertCapacity(factor=1.25).places(900, 8, k=1)
            141
        """
        return k * int(self.factor * -(-num_tokens // num_experts))

    def apply(
        self, assignment: Assignment, ids_TK: Tensor, probs_TE: Tensor
    ) -> Assignment:
        """Drops what goes beyond the places of an expert.

        Args:
            assignment: Routes of a gate with K experts for each real token.
            ids_TK: Experts of each token, best first.
            probs_TE: Probabilities that decide who is served first; no gradient flows.

        Returns:
            The routes that are served, with the others in `dropped`.
        """
        k = ids_TK.shape[1]
        tokens_R, experts_R = assignment.token_index_R, assignment.expert_index_R
        places = self.places(assignment.num_routes // k, assignment.num_experts, k=k)
        is_choice_RK = ids_TK.index_select(0, tokens_R) == experts_R.unsqueeze(1)
        # Routes come sorted by expert and token. Stable sorts, from the last key to the
        # first, put them in the order of service: expert, choice, score, token.
        order_R = torch.arange(assignment.num_routes, device=tokens_R.device)
        if self.priority == "score":
            first_T = probs_TE.detach().gather(1, ids_TK[:, :1]).squeeze(1)
            score_R = first_T.index_select(0, tokens_R)
            order_R = torch.argsort(score_R, descending=True, stable=True)
        for key_R in (is_choice_RK.int().argmax(1), experts_R):
            step_R = torch.argsort(key_R.index_select(0, order_R), stable=True)
            order_R = order_R.index_select(0, step_R)
        counts_E = assignment.counts_E
        start_E = counts_E.cumsum(0) - counts_E
        place_R = torch.arange(len(order_R), device=order_R.device)
        place_R = place_R - start_E.index_select(0, experts_R)
        served_R = torch.zeros_like(order_R, dtype=torch.bool)
        return assignment.keep(served_R.index_put((order_R,), place_R < places))
