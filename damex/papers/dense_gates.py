"""Gates from dense to sparse: a softmax over all experts, optionally thresholded.

Axes: V real tokens, E experts, R routes (token-expert pairs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from damex.errors import check_number
from damex.moe.gates import Gate
from damex.moe.routing import Assignment, GroupChoice, Packing, restrict


class DenseToSparseGate(Gate):
    """Weights softmax(logits / tau), without routes of small weight.

    At a high tau all experts learn from all tokens; as it falls, more weights drop
    below the threshold and their experts are not computed (Nie et al. 2021, arXiv
    2112.14397; Nguyen et al. 2025, arXiv 2503.03213, eq. 12). The best expert of a
    token, among those allowed (ties go to the lowest id), is always kept, and weights
    are not renormalized.

    tau = start * (end / start)^p for the training progress p in [0, 1], which
    `begin_step` sets and the checkpoint stores, so that evaluation uses the last
    temperature. The norm of a linear router's weights can undo any temperature (eq. 15
    there), that of an `MLPRouter` cannot. The number of routes depends on the logits,
    which synchronizes a GPU, unless all are kept.

    Args:
        start_temperature: tau at p = 0, above 0.
        end_temperature: tau at p = 1, above 0.
        threshold: Smallest weight that is computed, in [0, 1); 0.0 keeps all routes.
    """

    progress: Tensor

    def __init__(
        self,
        *,
        start_temperature: float = 2.0,
        end_temperature: float = 0.1,
        threshold: float = 0.01,
    ) -> None:
        super().__init__()
        check_number(
            "DenseToSparseGate",
            "above 0",
            start_temperature=start_temperature,
            end_temperature=end_temperature,
        )
        check_number("DenseToSparseGate", "in [0, 1)", threshold=threshold)
        self.start_temperature = start_temperature
        self.end_temperature = end_temperature
        self.threshold = threshold
        self.register_buffer("progress", torch.zeros(()))
        self._has_progress = start_temperature == end_temperature

    @property
    def has_fixed_routes(self) -> bool:
        """Whether all routes are kept, so that every token gets all experts."""
        return self.threshold == 0.0

    @property
    def temperature(self) -> Tensor:
        """The tau of the current progress, a scalar."""
        start, end = self.start_temperature, self.end_temperature
        # Section 3.1 of Nguyen et al.: uniform as tau -> inf, one-hot as tau -> 0.
        return start * (end / start) ** self.progress

    def check_group_choice(self, choice: GroupChoice, *, smallest: int) -> None:
        """Reject settings that keep all routes."""
        if self.has_fixed_routes:
            raise ValueError(
                "DenseToSparseGate: threshold=0.0 routes each token to all experts, "
                f"but {' and '.join(choice.options)} keeps it to those of one group; "
                "set threshold=0.01"
            )

    def begin_step(self, progress: float | None) -> None:
        """Set the temperature by the progress p; None leaves it unchanged."""
        if progress is None:
            return
        check_number("DenseToSparseGate", "in [0, 1]", progress=progress)
        self.progress.fill_(progress)
        self._has_progress = True

    def forward(
        self,
        logits_VE: Tensor,
        packing: Packing | None = None,
        allowed_VE: Tensor | None = None,
    ) -> Assignment:
        """Choose the routes of large weight, 1 to E per token.

        Raises RuntimeError in training before the progress is set.
        """
        if self.training and not self._has_progress:
            raise RuntimeError(
                "DenseToSparseGate: the temperature depends on the progress of the "
                "training, which is not set; call begin_step(progress), from 0 to 1, "
                "before each forward in training"
            )
        num_tokens, num_experts = logits_VE.shape
        if self.threshold * num_experts > 1:
            raise ValueError(
                f"DenseToSparseGate: equal weights of {num_experts} experts are below "
                f"threshold={self.threshold}, so it would never be dense; set a "
                f"threshold of {1 / num_experts:.2g} or less"
            )
        # Nguyen et al. 2025, eq. 12: softmax_i((b1_i' x + b0_i) / tau).
        weights_VE = torch.softmax(logits_VE / self.temperature, dim=-1)
        if self.has_fixed_routes:
            return _all_routes(weights_VE)
        keep_VE = weights_VE >= self.threshold
        if allowed_VE is not None:
            keep_VE = keep_VE & allowed_VE
            logits_VE = restrict(logits_VE, allowed_VE)
        # By logits, as equal weights may hide a difference.
        best_V1 = torch.sort(logits_VE, dim=-1, descending=True, stable=True)[1][:, :1]
        token_R, expert_R = keep_VE.scatter(1, best_V1, True).nonzero(as_tuple=True)
        return Assignment.from_pairs(
            token_R,
            expert_R,
            weights_VE[token_R, expert_R],
            num_tokens=num_tokens,
            num_experts=num_experts,
        )


class DenseSoftmaxGate(Gate):
    """The classical dense mixture of all experts (Nguyen et al. 2025, eq. 2).

    Smooth in the router's weights and without unused experts, at E times the compute.
    """

    def has_even_load(self, tokens: str) -> bool:
        """True: every token reaches all experts."""
        return True

    def forward(self, logits_VE: Tensor, packing: Packing | None = None) -> Assignment:
        """Route each token to all experts, with weights that sum to 1."""
        # Nguyen et al. 2025, eq. 2: softmax_i(b1_i' x + b0_i).
        return _all_routes(torch.softmax(logits_VE, dim=-1))


def _all_routes(weights_VE: Tensor) -> Assignment:
    num_experts = weights_VE.shape[1]
    ids_E = torch.arange(num_experts, device=weights_VE.device)
    return Assignment.from_topk(
        ids_E.expand_as(weights_VE), weights_VE, num_experts=num_experts
    )
