"""The linear router of Shazeer et al. 2017, Switch, V-MoE and DAMEX.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from damex.moe.routers.precision import check_sizes, full_precision_linear


class LinearRouter(nn.Module):
    """Logits as one linear map of the token.

    Dtype policy: computed in float32 with autocast off, also in a half-precision model;
    float64 tokens or parameters keep float64. Routing must not flip between experts
    because of bfloat16 rounding.

    Args:
        embed_dims: D.
        num_experts: E.
        bias: Whether to add a bias per expert; DAMEX has none.
        init_std: Standard deviation of the normal initial weights; 0.0 starts all
            experts equal (Chen et al. 2022). The bias starts at zero.

    Raises:
        ValueError: If a size is not positive or `init_std` is negative.
    """

    def __init__(
        self,
        embed_dims: int,
        num_experts: int,
        *,
        bias: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        check_sizes("LinearRouter", embed_dims=embed_dims, num_experts=num_experts)
        if not init_std >= 0.0:
            raise ValueError(f"LinearRouter: init_std must be >= 0, got {init_std}")
        self.embed_dims = embed_dims
        self.num_experts = num_experts
        self.init_std = init_std
        self.weight_ED = nn.Parameter(torch.empty(num_experts, embed_dims))
        self.bias_E = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew and zeroes the bias."""
        nn.init.normal_(self.weight_ED, std=self.init_std)
        if self.bias_E is not None:
            nn.init.zeros_(self.bias_E)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores every expert for every token.

        Args:
            tokens: (..., D).

        Returns:
            logits: (..., E), float32 (float64 for float64 input).
        """
        return full_precision_linear(tokens, self.weight_ED, self.bias_E)

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return (
            f"embed_dims={self.embed_dims}, num_experts={self.num_experts}, "
            f"bias={self.bias_E is not None}, init_std={self.init_std}"
        )
