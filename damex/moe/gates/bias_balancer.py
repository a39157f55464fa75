"""Load balance without a loss: a bias per expert that follows its load.

Axes: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn


class BiasBalancer(nn.Module):
    """Adds a bias to the scores by which experts are chosen, and to nothing else.

    After every step the bias of each expert with less than the mean load rises by
    `rate`, and that of each with more falls by it (Wang et al. 2024, arXiv 2408.15664,
    Algorithm 1; DeepSeek-V3). Weights of routes and the gradients of the router are
    those of the unbiased scores, so balancing does not disturb the task. Scores are
    probabilities, as `rate` is meant for numbers between 0 and 1.

    A forward in training only counts. `step` moves the bias: call it once per training
    step, as a learning-rate schedule is. A bias that moved in the forward would make
    activation recomputation choose other experts. damex's detectors `gather` at the end
    of each forward and `step` at the start of the next one. So a checkpoint between two
    training steps, which one process writes for all, holds the load of all processes,
    and a resumed run goes on as if never stopped, with any number of them. What is not
    gathered is in no checkpoint.

    DDP's `broadcast_buffers` overwrites what other processes have counted but not
    gathered: with it, `gather` or `step` after every forward.

    Args:
        num_experts: E.
        rate: Step of the bias, above 0. damex's detectors take one step per forward in
            training, so with gradient accumulation each micro-batch is a step; divide
            the rate by their number to move at most as far per update.

    Raises:
        ValueError: If `num_experts` or `rate` is not positive.
    """

    bias_E: Tensor
    counts_E: Tensor
    seen_E: Tensor

    def __init__(self, num_experts: int, *, rate: float = 0.001) -> None:
        super().__init__()
        if num_experts < 1 or not rate > 0.0:
            raise ValueError(
                "BiasBalancer: num_experts and rate must be positive, got "
                f"{num_experts} and {rate}"
            )
        self.rate = rate
        self.register_buffer("bias_E", torch.zeros(num_experts))
        # Of all processes, waiting for the step.
        self.register_buffer("counts_E", torch.zeros(num_experts, dtype=torch.int64))
        # Of this process alone, waiting to be gathered.
        seen_E = torch.zeros(num_experts, dtype=torch.int64)
        self.register_buffer("seen_E", seen_E, persistent=False)
        self._is_gathered = False

    @torch.no_grad()
    def forward(self, logits_TE: Tensor) -> Tensor:
        """Scores to choose by.

        Args:
            logits_TE: Router logits, with the gate's noise if it has any.

        Returns:
            scores_TE: Probabilities plus bias, without gradient.

        Raises:
            ValueError: If the number of experts is another one.
        """
        if logits_TE.shape[-1] != self.bias_E.shape[0]:
            raise ValueError(
                f"BiasBalancer: made for {self.bias_E.shape[0]} experts, but the "
                f"router scores {logits_TE.shape[-1]}; give both the same num_experts"
            )
        return torch.softmax(logits_TE, dim=-1) + self.bias_E

    def observe(self, counts_E: Tensor) -> None:
        """Adds the load of one forward in training to that of the step.

        Args:
            counts_E: Routes of each expert.
        """
        if not self._is_gathered:
            self.seen_E.add_(counts_E)

    def gather(self) -> None:
        """Closes the load of the step, summed over all processes, which all call this.

        What comes later, such as activation recomputation, counts no more until `step`.
        """
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self.seen_E)
        self.counts_E.add_(self.seen_E)
        self.seen_E.zero_()
        self._is_gathered = True

    def step(self) -> None:
        """Moves the bias by the load since the last step; gathers it, if none did."""
        if not self._is_gathered:
            self.gather()
        load_E = self.counts_E.double()
        self.bias_E.add_(torch.sign(load_E.mean() - load_E).float(), alpha=self.rate)
        self.counts_E.zero_()
        self._is_gathered = False

    def extra_repr(self) -> str:
        """Options, for `print(module)`."""
        return f"num_experts={self.bias_E.shape[0]}, rate={self.rate}"
