"""A router with one hidden layer.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe.routers.precision import check_sizes, full_precision_linear

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "gelu": functional.gelu,
        "relu": functional.relu,
    }
)


class MLPRouter(nn.Module):
    """Logits as linear(activation(linear(token))).

    With a linear router a temperature can be traded for the size of the router's
    weights, so neither can be estimated; a non-linear router mends that (Nguyen et al.
    2025, arXiv 2503.03213, eq. 17 and Theorem 4). `activation` should then differ from
    that of the experts.

    Dtype policy: that of `LinearRouter`.

    Args:
        embed_dims: D.
        num_experts: E.
        hidden_dims: H of the router; None stands for D.
        activation: One of 'tanh', 'sigmoid', 'gelu', 'relu'.
        init_std: Standard deviation of the normal initial weights of the second layer;
            0.0 starts all experts equal. The first is xavier uniform, biases are zero.

    Raises:
        ValueError: If a size is not positive, the activation is unknown or `init_std`
            is negative.
    """

    def __init__(
        self,
        embed_dims: int,
        num_experts: int,
        *,
        hidden_dims: int | None = None,
        activation: str = "tanh",
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        hidden_dims = embed_dims if hidden_dims is None else hidden_dims
        check_sizes(
            "MLPRouter",
            embed_dims=embed_dims,
            num_experts=num_experts,
            hidden_dims=hidden_dims,
        )
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"MLPRouter: unknown activation {activation!r}; "
                f"use one of {sorted(ACTIVATIONS)}"
            )
        if not init_std >= 0.0:
            raise ValueError(f"MLPRouter: init_std must be >= 0, got {init_std}")
        self.embed_dims = embed_dims
        self.num_experts = num_experts
        self.activation = activation
        self.init_std = init_std
        self.w1_HD = nn.Parameter(torch.empty(hidden_dims, embed_dims))
        self.b1_H = nn.Parameter(torch.empty(hidden_dims))
        self.w2_EH = nn.Parameter(torch.empty(num_experts, hidden_dims))
        self.b2_E = nn.Parameter(torch.empty(num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew and zeroes the biases."""
        nn.init.xavier_uniform_(self.w1_HD)
        nn.init.normal_(self.w2_EH, std=self.init_std)
        nn.init.zeros_(self.b1_H)
        nn.init.zeros_(self.b2_E)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores every expert for every token.

        Args:
            tokens: (..., D).

        Returns:
            logits: (..., E), float32 (float64 for float64 input).
        """
        hidden = full_precision_linear(tokens, self.w1_HD, self.b1_H)
        hidden = ACTIVATIONS[self.activation](hidden)
        return full_precision_linear(hidden, self.w2_EH, self.b2_E)

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return (
            f"embed_dims={self.embed_dims}, num_experts={self.num_experts}, "
            f"hidden_dims={self.b1_H.shape[0]}, activation={self.activation!r}, "
            f"init_std={self.init_std}"
        )
