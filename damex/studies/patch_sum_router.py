"""The router of Chen et al. 2022 (arXiv 2208.02813), over samples of several patches.

Axes: P patches of a sample, D numbers in a patch, E experts.
"""

from __future__ import annotations

from torch import Tensor, nn

from damex.moe import LinearRouter

__all__ = ["PatchSumRouter"]


class PatchSumRouter(nn.Module):
    """h_m(x) = <theta_m, sum_p x_p> (section 3.2).

    Args:
        num_experts: E.
        patch_dims: D.
        init_std: Of theta; the paper starts at 0.
    """

    def __init__(
        self, num_experts: int, patch_dims: int, *, init_std: float = 0.0
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.patch_dims = patch_dims
        self.linear = LinearRouter(patch_dims, num_experts, init_std=init_std)

    def reset_parameters(self) -> None:
        """Draws theta anew."""
        self.linear.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores every expert for every sample.

        Args:
            tokens: (..., P*D).

        Returns:
            logits: (..., E).
        """
        patches = tokens.unflatten(-1, (-1, self.patch_dims))
        return self.linear(patches.sum(-2))
