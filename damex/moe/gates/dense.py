"""From all experts to few: a softmax whose temperature falls during training.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from damex.moe.gates.topk import flatten_images
from damex.moe.routing import Assignment

SCHEDULES = ("exponential", "linear")


class DenseToSparseGate(nn.Module):
    """Weights softmax(logits / tau), routes of small weight dropped.

    While tau is high all experts learn from all tokens; as it falls, ever more weights
    drop below the threshold and their experts are not computed (Nie et al. 2021, arXiv
    2112.14397; Nguyen et al. 2025, arXiv 2503.03213, eq. 12). The best expert of a
    token (of equals the lowest id) is always kept, and weights are not renormalised.

    With `end_k` training ends in top-k routing: the number of experts that a token may
    keep falls from E to `end_k` in equal steps, and stays there for the last
    1 / (E - end_k + 1) of the training and in evaluation. The threshold may still drop
    more; with `threshold=0.0` every token then has exactly `end_k` routes.

    tau follows the training progress p in [0, 1]: start * (end / start)^p, or start +
    (end - start) * p. `set_progress` tells it; p is kept in the checkpoint, so that
    evaluation uses the temperature that was trained last. Without a call p stays 0.

    Unless all routes are kept (`threshold=0.0` and no `end_k`) their number depends on
    the logits, so a GPU has to tell it to the host, and a compiled graph has to be told
    to expect that; see `MoELayer`.

    With a linear router the size of its weights can undo any temperature (eq. 15
    there), with `MLPRouter` not. `learn_scale` makes sense only with the latter.

    Args:
        start_temperature: tau at p = 0, above 0.
        end_temperature: tau at p = 1, above 0.
        schedule: 'exponential' or 'linear'.
        threshold: Smallest weight that is computed, in [0, 1); 0.0 keeps all routes.
        end_k: Most experts of a token at p = 1; None for no such limit.
        learn_scale: Whether tau is the scheduled one times a learned positive factor,
            `log_scale.exp()`, that starts at 1 (Nguyen et al. 2025 estimate tau along
            with the router).

    Raises:
        ValueError: If a temperature is not positive, the schedule is unknown, the
            threshold is not in [0, 1) or `end_k` is not a positive integer.
    """

    progress: Tensor

    def __init__(
        self,
        *,
        start_temperature: float = 2.0,
        end_temperature: float = 0.1,
        schedule: Literal["exponential", "linear"] = "exponential",
        threshold: float = 0.01,
        end_k: int | None = None,
        learn_scale: bool = False,
    ) -> None:
        super().__init__()
        if not (start_temperature > 0.0 and end_temperature > 0.0):
            raise ValueError(
                "DenseToSparseGate: temperatures must be above 0, got "
                f"{start_temperature} at the start and {end_temperature} at the end"
            )
        if schedule not in SCHEDULES:
            raise ValueError(
                f"DenseToSparseGate: unknown schedule {schedule!r}; "
                f"use one of {SCHEDULES}"
            )
        if not 0.0 <= threshold < 1.0:
            raise ValueError(
                f"DenseToSparseGate: threshold must be in [0, 1), got {threshold}"
            )
        if end_k is not None and (type(end_k) is not int or end_k < 1):
            raise ValueError(
                "DenseToSparseGate: end_k must be an integer of 1 or more, or None, "
                f"got {end_k!r}"
            )
        self.start_temperature = start_temperature
        self.end_temperature = end_temperature
        self.schedule = schedule
        self.threshold = threshold
        self.end_k = end_k
        self.register_buffer("progress", torch.zeros(()))
        self.log_scale = nn.Parameter(torch.zeros(())) if learn_scale else None

    @property
    def has_fixed_routes(self) -> bool:
        """Whether all routes are kept, so that every token gets all experts."""
        return self.threshold == 0.0 and self.end_k is None

    @property
    def temperature(self) -> Tensor:
        """The tau of the present progress, a scalar."""
        start, end = self.start_temperature, self.end_temperature
        if self.schedule == "linear":
            scheduled = start + (end - start) * self.progress
        else:
            scheduled = start * (end / start) ** self.progress
        return scheduled if self.log_scale is None else scheduled * self.log_scale.exp()

    def limit(self, num_experts: int) -> Tensor:
        """Most experts of a token at the present progress, a scalar.

        Args:
            num_experts: E.

        Raises:
            ValueError: If there are fewer than `end_k` experts.
        """
        end = num_experts if self.end_k is None else self.end_k
        if end > num_experts:
            raise ValueError(
                f"DenseToSparseGate: end_k={end} experts per token asked for, but "
                f"there are only {num_experts} experts; lower end_k or raise "
                "num_experts"
            )
        dropped = torch.floor(self.progress * (num_experts - end + 1))
        return (num_experts - dropped).clamp_min(end)

    def set_progress(self, progress: float) -> None:
        """Tells how much of the training is done.

        Args:
            progress: p, 0 at the start and 1 at the end.

        Raises:
            ValueError: If it is not in [0, 1].
        """
        if not 0.0 <= progress <= 1.0:
            raise ValueError(
                f"DenseToSparseGate: progress must be in [0, 1], got {progress}"
            )
        self.progress.fill_(progress)

    def forward(
        self, logits_BNE: Tensor, token_mask_BN: Tensor | None = None
    ) -> Assignment:
        """Weighs experts and drops those of small weight.

        Args:
            logits_BNE: Clean router logits.
            token_mask_BN: True for real tokens; the others get no route.

        Returns:
            Routes over the flattened T = B*N tokens, 1 to E for each real token.
        """
        logits_TE, mask_T = flatten_images(logits_BNE, token_mask_BN)
        num_tokens, num_experts = logits_TE.shape
        weights_TE = torch.softmax(logits_TE / self.temperature, dim=-1)
        if self.has_fixed_routes:
            ids_E = torch.arange(num_experts, device=logits_TE.device)
            return Assignment.from_topk(
                ids_E.expand(num_tokens, num_experts),
                weights_TE,
                num_experts=num_experts,
                token_mask_T=mask_T,
            )
        keep_TE = weights_TE >= self.threshold
        # Of the logits, as equal weights may hide a difference; argmax of the first.
        order_TE = torch.sort(logits_TE, dim=-1, descending=True, stable=True)[1]
        rank_TE = torch.argsort(order_TE, dim=-1)
        keep_TE = (keep_TE | (rank_TE == 0)) & (rank_TE < self.limit(num_experts))
        if mask_T is not None:
            keep_TE = keep_TE & mask_T.unsqueeze(1)
        token_R, expert_R = keep_TE.nonzero(as_tuple=True)
        return Assignment.from_pairs(
            token_R,
            expert_R,
            weights_TE[token_R, expert_R],
            num_tokens=num_tokens,
            num_experts=num_experts,
        )

    def extra_repr(self) -> str:
        """Options, for `print(module)`."""
        return (
            f"start_temperature={self.start_temperature}, "
            f"end_temperature={self.end_temperature}, schedule={self.schedule!r}, "
            f"threshold={self.threshold}, end_k={self.end_k}, "
            f"learn_scale={self.log_scale is not None}"
        )


class DenseSoftmaxGate(nn.Module):
    """The classical mixture of experts (Nguyen et al. 2025, eq. 2): no expert is off.

    Smooth in the router's weights and without unused experts, at E times the compute
    of one expert.
    """

    def forward(
        self, logits_BNE: Tensor, token_mask_BN: Tensor | None = None
    ) -> Assignment:
        """Weighs all experts.

        Args:
            logits_BNE: Clean router logits.
            token_mask_BN: True for real tokens; the others get no route.

        Returns:
            Routes over the flattened T = B*N tokens, E for each real token; the
            weights of a token sum to 1.
        """
        logits_TE, mask_T = flatten_images(logits_BNE, token_mask_BN)
        num_tokens, num_experts = logits_TE.shape
        ids_E = torch.arange(num_experts, device=logits_TE.device)
        return Assignment.from_topk(
            ids_E.expand(num_tokens, num_experts),
            torch.softmax(logits_TE, dim=-1),
            num_experts=num_experts,
            token_mask_T=mask_T,
        )
