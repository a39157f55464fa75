"""What one forward of one MoE layer did: the input of losses, metrics and pictures.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from damex.moe.assignment import Assignment


@dataclass(frozen=True, eq=False)
class RoutingRecord:
    """The routing of one forward; returned by the layer and stored nowhere.

    Attributes:
        logits_TE: Clean router logits (before any gate noise), float32. Rows of padded
            tokens are zero and mean nothing.
        token_mask_T: True for real tokens; None when all tokens are real.
        group_ids_T: Dataset group of each token's image, -1 where unknown; None when
            no ids were given.
        assignment: The routes that were computed.
        group_experts_GE: True where a group may use an expert; None without a map.
        foreground_T: True for tokens on an object, padded ones being False or not; None
            where that is not known.
        losses: Weighted losses by name; empty in evaluation.
    """

    logits_TE: Tensor
    token_mask_T: Tensor | None
    group_ids_T: Tensor | None
    assignment: Assignment
    group_experts_GE: Tensor | None = None
    foreground_T: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)

    @property
    def probs_TE(self) -> Tensor:
        """Softmax of the clean logits over all experts, (T, E)."""
        return torch.softmax(self.logits_TE, dim=-1)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.logits_TE.shape[1]

    def valid_mask(self) -> Tensor:
        """A (T,) bool mask of the real tokens, also when no mask was given."""
        if self.token_mask_T is not None:
            return self.token_mask_T
        return self.logits_TE.new_ones(self.logits_TE.shape[0], dtype=torch.bool)

    def detached(self) -> RoutingRecord:
        """A copy without autograd graph, safe to keep in hooks and metrics."""
        return dataclasses.replace(
            self,
            logits_TE=self.logits_TE.detach(),
            assignment=self.assignment.detached(),
            losses={name: loss.detach() for name, loss in self.losses.items()},
        )
