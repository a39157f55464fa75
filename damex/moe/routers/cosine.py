"""The cosine router of Tutel and SM3Det.

Axes: B images, N tokens per image, T = B*N tokens, D model width, P projected width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe.routers.precision import check_sizes, full_precision_linear


class CosineRouter(nn.Module):
    """Logits as the cosine of the projected token and an expert's key, over tau.

    The length of a token does not count, and logits stay within 1 / tau. The learned
    temperature tau is kept as log(1 / tau) and clamped from below at `min_temperature`;
    its gradient is zero while it is clamped, as in Tutel (`CosineTopKGate`; Li et al.
    2023, arXiv 2206.04046; SM3Det, arXiv 2412.20665).

    Dtype policy: that of `LinearRouter`.

    Args:
        embed_dims: D.
        num_experts: E.
        proj_dims: P.
        init_temperature: tau at the start.
        min_temperature: The smallest tau.

    Raises:
        ValueError: If a size is not positive, or not 0 < `min_temperature` <=
            `init_temperature`.
    """

    def __init__(
        self,
        embed_dims: int,
        num_experts: int,
        *,
        proj_dims: int = 256,
        init_temperature: float = 0.5,
        min_temperature: float = 0.01,
    ) -> None:
        super().__init__()
        check_sizes(
            "CosineRouter",
            embed_dims=embed_dims,
            num_experts=num_experts,
            proj_dims=proj_dims,
        )
        if not 0.0 < min_temperature <= init_temperature:
            raise ValueError(
                "CosineRouter: needs 0 < min_temperature <= init_temperature, got "
                f"{min_temperature} and {init_temperature}"
            )
        self.embed_dims = embed_dims
        self.num_experts = num_experts
        self.init_temperature = init_temperature
        self.min_temperature = min_temperature
        self.proj_PD = nn.Parameter(torch.empty(proj_dims, embed_dims))
        self.bias_P = nn.Parameter(torch.empty(proj_dims))
        self.key_EP = nn.Parameter(torch.empty(num_experts, proj_dims))
        self.log_scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    @property
    def temperature(self) -> Tensor:
        """tau, never below `min_temperature`; a scalar of the parameters' dtype."""
        return torch.exp(-self.log_scale.clamp(max=-math.log(self.min_temperature)))

    def reset_parameters(self) -> None:
        """Draws projection and keys anew and sets the temperature back."""
        nn.init.xavier_uniform_(self.proj_PD)
        # Not zero: the cosine of a zero token would have no direction to learn.
        bound = self.embed_dims**-0.5
        nn.init.uniform_(self.bias_P, -bound, bound)
        nn.init.normal_(self.key_EP, std=0.01)
        nn.init.constant_(self.log_scale, -math.log(self.init_temperature))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores every expert for every token.

        Args:
            tokens: (..., D).

        Returns:
            logits: (..., E), float32 (float64 for float64 input).
        """
        projected = full_precision_linear(tokens, self.proj_PD, self.bias_P)
        key_EP = functional.normalize(self.key_EP.to(projected.dtype), dim=-1)
        cosine = full_precision_linear(functional.normalize(projected, dim=-1), key_EP)
        return cosine / self.temperature.to(cosine.dtype)

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return (
            f"embed_dims={self.embed_dims}, num_experts={self.num_experts}, "
            f"proj_dims={self.bias_P.shape[0]}, "
            f"init_temperature={self.init_temperature}, "
            f"min_temperature={self.min_temperature}"
        )
