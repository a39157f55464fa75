"""Expert capacity: each expert serves so many tokens and no more.

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
    """Lets every expert take k * int(factor * ceil(V / E)) routes per forward.

    That is the arithmetic of Tutel 0.2.1, and with it of the released code of DAMEX; V
    counts the real tokens of the whole batch, and E the experts. Routes beyond that
    are dropped and kept apart in `Assignment.dropped`; a token without any route
    left passes the layer on its residual alone. First choices of all tokens are served
    before second ones, and of these the tokens with the highest probability of their
    first choice (batch-priority routing of V-MoE, arXiv 2106.05974).

    The same factor holds in evaluation. The capacity is shared by a batch, so with a
    capacity an image's result depends on the other images of its batch: the one option
    of this package of which that is true.

    It is also shared by all queries of a decoder, whatever its attention mask
    hides. In training the denoising queries of DINO, which are made of the ground
    truth, take capacity from the matching queries; at test time there are none. The
    released code of DAMEX does the same, so the coupling is kept.

    Attributes:
        factor: Capacity over what perfect balance would need; above 0.

    Raises:
        ValueError: If the factor is not positive.
    """

    factor: float = 1.25

    def __post_init__(self) -> None:
        check_number("ExpertCapacity", "above 0", factor=self.factor)

    def capacity(self, num_tokens: int, num_experts: int, *, k: int) -> int:
        """Most routes of each expert.

        Args:
            num_tokens: Real tokens of the batch.
            num_experts: E.
            k: Experts per token.

        Example:
            >>> ExpertCapacity(factor=1.25).capacity(900, 8, k=1)
            141
        """
        return k * int(self.factor * -(-num_tokens // num_experts))

    def apply(
        self, assignment: Assignment, ids_VK: Tensor, probs_VE: Tensor
    ) -> Assignment:
        """Drops what goes beyond the capacity of an expert.

        Args:
            assignment: Routes of a gate with K experts for each real token.
            ids_VK: Experts of each token, best first.
            probs_VE: Probabilities that decide who is served first; no gradient flows.

        Returns:
            The routes that are served, with the others in `dropped`.
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

    After every step the bias of each expert with less than the mean load rises by
    `rate`, and that of each with more falls by it (Wang et al. 2024, arXiv 2408.15664,
    Algorithm 1; DeepSeek-V3). Weights of routes and the gradients of the router are
    those of the unbiased scores, so balancing does not disturb the task. Scores are
    probabilities, as `rate` is meant for numbers between 0 and 1.

    A forward in training only counts. `step` moves the bias: call it once per training
    step, as a learning-rate schedule is. A bias that moved in the forward would make
    activation recomputation choose other experts. damex's detectors
    `all_reduce` at the end of each forward and `step` at the start of the next one. So
    a checkpoint between two training steps, which one process writes for all, holds the
    load of all processes, and a resumed run goes on as if never stopped, with any
    number of them. What is not summed yet is in no checkpoint.

    DDP's `broadcast_buffers` overwrites what other processes have counted but not
    summed: with it, `all_reduce` or `step` after every forward.

    Args:
        num_experts: E.
        rate: Step of the bias, above 0. damex's detectors take one step per forward in
            training, so with gradient accumulation each micro-batch is a step; divide
            the rate by their number to move at most as far per update.

    Raises:
        ValueError: If `num_experts` or `rate` is not positive.
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
        # Of all processes, waiting for the step.
        self.register_buffer("counts_E", torch.zeros(num_experts, dtype=torch.int64))
        # Of this process alone, waiting to be summed.
        seen_E = torch.zeros(num_experts, dtype=torch.int64)
        self.register_buffer("seen_E", seen_E, persistent=False)
        self._is_reduced = False

    @torch.no_grad()
    def forward(self, logits_VE: Tensor) -> Tensor:
        """Scores to choose by.

        Args:
            logits_VE: Router logits, with the gate's noise if it has any.

        Returns:
            scores_VE: Probabilities plus bias, without gradient.

        Raises:
            ValueError: If the number of experts is another one.
        """
        if logits_VE.shape[-1] != self.bias_E.shape[0]:
            raise ValueError(
                f"BiasBalancer: made for {self.bias_E.shape[0]} experts, but the "
                f"router scores {logits_VE.shape[-1]}; give both the same num_experts"
            )
        return torch.softmax(logits_VE, dim=-1) + self.bias_E

    def observe(self, counts_E: Tensor) -> None:
        """Adds the load of one forward in training to that of the step.

        Args:
            counts_E: Routes of each expert.
        """
        if not self._is_reduced:
            self.seen_E.add_(counts_E)

    def all_reduce(self) -> None:
        """Closes the load of the step, summed over all processes, which all call this.

        What comes later, such as activation recomputation, counts no more until `step`.
        """
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self.seen_E)
        self.counts_E.add_(self.seen_E)
        self.seen_E.zero_()
        self._is_reduced = True

    def step(self) -> None:
        """Moves the bias by the load since the last step, of all processes."""
        if not self._is_reduced:
            self.all_reduce()
        load_E = self.counts_E.double()
        self.bias_E.add_(torch.sign(load_E.mean() - load_E).float(), alpha=self.rate)
        self.counts_E.zero_()
        self._is_reduced = False
