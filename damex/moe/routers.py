"""Routers: tokens (..., D) -> logits (..., E), in float32 even under autocast.

Routing must not flip between experts because of bfloat16 rounding. float64 tokens or
parameters stay float64.

Axes: D model width, E experts, H hidden width, P projected width, G dataset groups.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.errors import check_choice, check_number, check_sizes
from damex.moe.experts import ACTIVATIONS


class Router(Protocol):
    """A module that scores experts, (..., D) -> logits (..., E), row by row.

    Logits are float32 (or float64) even under autocast; their softmax over E is the
    routing distribution.
    """

    num_experts: int

    def __call__(self, tokens: Tensor, /) -> Tensor:
        """Return the logits of each row of `tokens`."""

    def reset_parameters(self) -> None:
        """Re-initialize the parameters."""


def full_precision_linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None
) -> Tensor:
    """`functional.linear` in float32 with autocast off; float64 stays float64."""
    dtype = torch.promote_types(x.dtype, weight_OI.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    bias_O = None if bias_O is None else bias_O.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        return functional.linear(x.to(dtype), weight_OI.to(dtype), bias_O)


class LinearRouter(nn.Module):
    """Logits as one linear map of the token.

    With a normal `init_std` of 0.0 all experts start equal (Chen et al. 2022). DAMEX
    has no bias; it starts at zero.
    """

    expert_rows = ("weight_ED", "bias_E")

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
        check_number("LinearRouter", ">= 0", init_std=init_std)
        self.embed_dims = embed_dims
        self.num_experts = num_experts
        self.init_std = init_std
        self.weight_ED = nn.Parameter(torch.empty(num_experts, embed_dims))
        self.bias_E = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the weights and set the bias to zero."""
        nn.init.normal_(self.weight_ED, std=self.init_std)
        if self.bias_E is not None:
            nn.init.zeros_(self.bias_E)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every expert for every token."""
        # Chen et al. 2022, section 3.2: h = Theta' x; pMoE, section 3.1: g = <w_s, x>.
        return full_precision_linear(tokens, self.weight_ED, self.bias_E)


MLP_ACTIVATIONS = ("tanh", "sigmoid", "gelu", "relu")


class MLPRouter(nn.Module):
    """Logits as linear(activation(linear(token))).

    For a linear router, the temperature and the norm of its weights are not
    identifiable; for a non-linear one they are (Nguyen et al. 2025, arXiv 2503.03213,
    eq. 17 and Theorem 4). `activation` should differ from that of the experts.

    Args:
        hidden_dims: H, by default D.
        activation: One of 'tanh', 'sigmoid', 'gelu', 'relu'.
        init_std: Standard deviation of the normal initial weights of the second layer;
            0.0 starts all experts equal. The first is xavier uniform, biases are zero.
    """

    expert_rows = ("w2_EH", "b2_E")

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
        check_choice("MLPRouter", MLP_ACTIVATIONS, activation=activation)
        check_number("MLPRouter", ">= 0", init_std=init_std)
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
        """Re-initialize the weights and set the biases to zero."""
        nn.init.xavier_uniform_(self.w1_HD)
        nn.init.normal_(self.w2_EH, std=self.init_std)
        nn.init.zeros_(self.b1_H)
        nn.init.zeros_(self.b2_E)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every expert for every token."""
        # Nguyen et al. 2025, eq. 17: a router pi(x, b1) + b0 that is not linear in x.
        hidden = full_precision_linear(tokens, self.w1_HD, self.b1_H)
        hidden = ACTIVATIONS[self.activation](hidden)
        return full_precision_linear(hidden, self.w2_EH, self.b2_E)


class CosineRouter(nn.Module):
    """Logits as the cosine of the projected token and the key of an expert, over tau.

    Independent of the length of a token and within +-1 / tau. The learned temperature
    tau is stored as log(1 / tau), starts at `init_temperature` and is clamped from
    below at `min_temperature`, with zero gradient while clamped, as in Tutel
    (`CosineTopKGate`; Li et al. 2023, arXiv 2206.04046; SM3Det, arXiv 2412.20665).
    """

    expert_rows = ("key_EP",)

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
        """tau, at least `min_temperature`; a scalar in the dtype of the parameters."""
        return torch.exp(-self.log_scale.clamp(max=-math.log(self.min_temperature)))

    def reset_parameters(self) -> None:
        """Re-initialize projection, keys and temperature."""
        nn.init.xavier_uniform_(self.proj_PD)
        # Not zero: the cosine of a zero token would have no gradient.
        bound = self.embed_dims**-0.5
        nn.init.uniform_(self.bias_P, -bound, bound)
        nn.init.normal_(self.key_EP, std=0.01)
        nn.init.constant_(self.log_scale, -math.log(self.init_temperature))

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every expert for every token."""
        projected = full_precision_linear(tokens, self.proj_PD, self.bias_P)
        key_EP = functional.normalize(self.key_EP.to(projected.dtype), dim=-1)
        cosine = full_precision_linear(functional.normalize(projected, dim=-1), key_EP)
        return cosine / self.temperature.to(cosine.dtype)


def expert_groups(num_groups: int, num_experts: int) -> tuple[tuple[int, ...], ...]:
    """Divide experts among dataset groups in order; the first groups get one more."""
    if not 1 <= num_groups <= num_experts:
        raise ValueError(
            f"expert_groups needs 1 <= num_groups <= num_experts, got {num_groups} "
            f"groups and {num_experts} experts"
        )
    small, more = divmod(num_experts, num_groups)
    starts = [g * small + min(g, more) for g in range(num_groups + 1)]
    return tuple(tuple(range(starts[g], starts[g + 1])) for g in range(num_groups))


class HierarchicalRouter(nn.Module):
    """Logits as log softmax over groups + log softmax within the group.

    The softmax over all experts is the product of the two levels (Nguyen et al. 2025,
    arXiv 2503.03213, eq. 20), and any gate can follow. Groups are those of
    `damex.moe.expert_groups`, like a layer's dataset groups: `DatasetRoutingLoss` then
    trains the first level only, and the second is free to divide the tokens of a
    dataset among its experts. Weights are normal with `init_std`, biases zero.
    """

    expert_rows = ("weight_ED", "bias_E")
    group_rows = ("group_weight_GD", "group_bias_G")
    slot_GS: Tensor
    place_E: Tensor

    def __init__(
        self,
        embed_dims: int,
        num_experts: int,
        *,
        num_groups: int,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        check_sizes(
            "HierarchicalRouter", embed_dims=embed_dims, num_experts=num_experts
        )
        check_number("HierarchicalRouter", ">= 0", init_std=init_std)
        groups = expert_groups(num_groups, num_experts)
        width = max(len(group) for group in groups)
        self.embed_dims = embed_dims
        self.num_experts = num_experts
        self.num_groups = num_groups
        self.init_std = init_std
        self.group_weight_GD = nn.Parameter(torch.empty(num_groups, embed_dims))
        self.group_bias_G = nn.Parameter(torch.empty(num_groups))
        self.weight_ED = nn.Parameter(torch.empty(num_experts, embed_dims))
        self.bias_E = nn.Parameter(torch.empty(num_experts))
        # One row of S slots per group; unused slots point to a column E of -inf.
        rows = [[*group, *[num_experts] * (width - len(group))] for group in groups]
        slot_GS = torch.tensor(rows)
        self.register_buffer("slot_GS", slot_GS, persistent=False)
        place_E = (slot_GS.flatten() < num_experts).nonzero().squeeze(1)
        self.register_buffer("place_E", place_E, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the weights and set the biases to zero."""
        for weight in (self.group_weight_GD, self.weight_ED):
            nn.init.normal_(weight, std=self.init_std)
        for bias in (self.group_bias_G, self.bias_E):
            nn.init.zeros_(bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every expert for every token by log-probabilities."""
        group = full_precision_linear(tokens, self.group_weight_GD, self.group_bias_G)
        inner = full_precision_linear(tokens, self.weight_ED, self.bias_E)
        inner = functional.pad(inner, (0, 1), value=-torch.inf)
        inner = inner.index_select(-1, self.slot_GS.flatten())
        # Nguyen et al. 2025, eq. 20: softmax_i2 within group i1.
        inner = torch.log_softmax(inner.unflatten(-1, self.slot_GS.shape), dim=-1)
        # Eq. 20: times softmax_i1 over groups, as a sum of logarithms.
        both = torch.log_softmax(group, dim=-1).unsqueeze(-1) + inner
        return both.flatten(-2).index_select(-1, self.place_E)
