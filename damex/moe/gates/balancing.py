"""Load balancing of experts: a capacity that drops routes, and a bias on the choice.

Axes: V real tokens, E experts, K experts per token, R routes (token-expert pairs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from damex.errors import check_number, check_sizes
from damex.moe.routing import Assignment


@dataclass(frozen=True, kw_only=True)
class ExpertCapacity:
    """Limits every expert to k * int(factor * ceil(V / E)) routes per forward pass.

    This is the arithmetic of Tutel 0.2.1 and released DAMEX; V counts the real tokens
    of the whole batch. Routes beyond it are moved to `Assignment.dropped`; a token
    without routes passes the layer on its residual only. First choices of all tokens
    are served before second ones, and of these the tokens with the highest probability
    of their first choice (batch-priority routing of V-MoE, arXiv 2106.05974).

    Also in evaluation, where no other option makes the result of an image depend on the
    other images of its batch. Queries of a decoder share it regardless of their
    attention mask: in training the denoising queries of DINO, made from the ground
    truth, take capacity from the matching queries, as in released DAMEX.
    """

    factor: float = 1.25

    def __post_init__(self) -> None:
        check_number("ExpertCapacity", "above 0", factor=self.factor)

    def capacity(self, num_tokens: int, num_experts: int, *, k: int) -> int:
        """Return the largest number of routes of each expert."""
        return k * int(self.factor * -(-num_tokens // num_experts))

    def apply(
        self, assignment: Assignment, ids_VK: Tensor, probs_VE: Tensor
    ) -> Assignment:
        """Drop the routes beyond the capacity of their expert.

        `ids_VK` are the experts of each token, best first; the probabilities set the
        order of service, without gradient.
        """
        k = ids_VK.shape[1]
        tokens_R, experts_R = assignment.token_index_R, assignment.expert_index_R
        num_tokens = assignment.num_routes // k
        capacity = self.capacity(num_tokens, assignment.num_experts, k=k)
        is_choice_RK = ids_VK.index_select(0, tokens_R) == experts_R.unsqueeze(1)
        # Routes come sorted by expert and token. Stable sorts, from the last key to the
        # first, put them in the order of service: expert, choice, score, token.
        first_V = probs_VE.detach().gather(1, ids_VK[:, :1]).squeeze(1)
        score_R = first_V.index_select(0, tokens_R)
        order_R = torch.argsort(score_R, descending=True, stable=True)
        for key_R in (is_choice_RK.int().argmax(1), experts_R):
            step_R = torch.argsort(key_R.index_select(0, order_R), stable=True)
            order_R = order_R.index_select(0, step_R)
        counts_E = assignment.counts_E
        start_E = counts_E.cumsum(0) - counts_E
        rank_R = torch.arange(len(order_R), device=order_R.device)
        rank_R = rank_R - start_E.index_select(0, experts_R)
        served_R = torch.zeros_like(order_R, dtype=torch.bool)
        return assignment.keep(served_R.index_put((order_R,), rank_R < capacity))


class BiasBalancer(nn.Module):
    """Adds a bias to the scores by which experts are chosen, and to nothing else.

    After every step the bias of each expert below the mean load rises by `rate`, and
    that of each above it falls by `rate` (Wang et al. 2024, arXiv 2408.15664, Algorithm
    1; DeepSeek-V3). Route weights and router gradients are those of the unbiased
    scores. Scores are probabilities, as `rate` is meant for numbers between 0 and 1.

    A forward pass in training only counts, since a bias that changed there would break
    activation recomputation; `step` moves the bias. The detectors of damex call
    `all_reduce` after each forward pass and `step` before the next one, so a checkpoint
    contains the load of all processes, and a resumed run continues exactly, on any
    number of them. With gradient accumulation, divide the rate by the number of
    micro-batches for the same movement per update.

    `broadcast_buffers` of DDP overwrites the unsummed counts of other processes: with
    it, call `all_reduce` or `step` after every forward pass.
    """

    expert_rows = ("bias_E", "counts_E")
    bias_E: Tensor
    counts_E: Tensor
    seen_E: Tensor

    def __init__(self, num_experts: int, *, rate: float = 0.001) -> None:
        super().__init__()
        check_sizes("BiasBalancer", num_experts=num_experts)
        check_number("BiasBalancer", "above 0", rate=rate)
        self.rate = rate
        self.register_buffer("bias_E", torch.zeros(num_experts))
        # Of all processes, until the next step.
        self.register_buffer("counts_E", torch.zeros(num_experts, dtype=torch.int64))
        # Of this process only, not yet summed.
        seen_E = torch.zeros(num_experts, dtype=torch.int64)
        self.register_buffer("seen_E", seen_E, persistent=False)
        self._is_reduced = False

    @torch.no_grad()
    def forward(self, logits_VE: Tensor) -> Tensor:
        """Return probabilities plus bias, without gradient, of (noisy) logits."""
        if logits_VE.shape[-1] != self.bias_E.shape[0]:
            raise ValueError(
                f"BiasBalancer: made for {self.bias_E.shape[0]} experts, but the "
                f"router scores {logits_VE.shape[-1]}; give both the same num_experts"
            )
        return torch.softmax(logits_VE, dim=-1) + self.bias_E

    def observe(self, counts_E: Tensor) -> None:
        """Add the load of one forward pass in training to that of the step."""
        if not self._is_reduced:
            self.seen_E.add_(counts_E)

    def all_reduce(self) -> None:
        """Sum the load of the step over all processes, and close it; collective.

        Later counts, such as those of activation recomputation, are ignored until
        `step`.
        """
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self.seen_E)
        self.counts_E.add_(self.seen_E)
        self.seen_E.zero_()
        self._is_reduced = True

    def step(self) -> None:
        """Move the bias by the load of all processes since the last step."""
        if not self._is_reduced:
            self.all_reduce()
        load_E = self.counts_E.double()
        self.bias_E.add_(torch.sign(load_E.mean() - load_E).float(), alpha=self.rate)
        self.counts_E.zero_()
        self._is_reduced = False
