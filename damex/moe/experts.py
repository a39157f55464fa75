"""A bank of feed-forward experts in one tensor per parameter.

Axes: V real tokens, D model width, H hidden width, E experts, R rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.errors import check_choice, check_number, check_sizes
from damex.moe.grouped import (
    BACKENDS,
    choose_backend,
    grouped_linear,
    spread_over_rows,
)


def _cubic(z: Tensor) -> Tensor:
    return z * z * z


def _identity(z: Tensor) -> Tensor:
    return z


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "celu": functional.celu,
        "silu": functional.silu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "cubic": _cubic,
        "identity": _identity,
    }
)
# Not a fixed function: has a learned slope per expert.
PRELU = "prelu"
PRELU_SLOPE = 0.25  # as in nn.PReLU


class FFNExperts(nn.Module):
    """E feed-forward networks: linear, activation, dropout, linear, dropout.

    Each expert is what a DETR's FFN is without its identity path, and is initialised
    as mmdet's DETR detectors initialise that: xavier uniform weights for each expert
    on its own (so that the number of experts does not change their scale), biases as
    in `nn.Linear`, uniform in +-1/sqrt(fan_in). Never hand the 3-D tensors to an
    initialiser as a whole; call `reset_parameters` after one that did.

    Dtype policy: that of `nn.Linear`, autocast included.

    Args:
        num_experts: E.
        embed_dims: D.
        hidden_dims: H.
        activation: One of `ACTIVATIONS`, or 'prelu' with one learned slope per expert.
            Released DAMEX uses 'gelu', DETR 'relu', DAB-DETR 'prelu'; Chen et al. 2022
            compare 'cubic' with linear experts, 'identity'.
        dropout: Probability, applied at both places where DETR's FFN has it.
        init_std: Standard deviation of weights drawn from a truncated normal, with
            biases at zero, as released DAMEX has it with 0.005 (timm's initialiser: the
            cut is at +-2, not at two deviations); None for the above.
        output_bias: Whether the second bias learns. False fixes it at zero, or at that
            of a dense FFN that is loaded; it stays in the checkpoint as a buffer.
        backend: See `damex.moe.grouped.grouped_linear`.

    Raises:
        ValueError: If a size or `init_std` is not positive, the dropout is not in
            [0, 1), or the activation or the back-end is unknown.
    """

    expert_rows = ("w1_EDH", "b1_EH", "w2_EHD", "b2_ED", "slope_E1")
    output_names: ClassVar[tuple[str, ...]] = ("w2_EHD", "b2_ED")
    b2_ED: Tensor  # a parameter, or a buffer without output_bias

    def __init__(
        self,
        num_experts: int,
        embed_dims: int,
        hidden_dims: int,
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        init_std: float | None = None,
        output_bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_sizes(
            "FFNExperts",
            num_experts=num_experts,
            embed_dims=embed_dims,
            hidden_dims=hidden_dims,
        )
        check_choice("FFNExperts", (*ACTIVATIONS, PRELU), activation=activation)
        check_number("FFNExperts", "in [0, 1)", dropout=dropout)
        check_number("FFNExperts", "above 0", init_std=init_std)
        check_choice("FFNExperts", BACKENDS, backend=backend)
        self.num_experts = num_experts
        self.embed_dims = embed_dims
        self.hidden_dims = hidden_dims
        self.activation = activation
        self.dropout = dropout
        self.init_std = init_std
        self.output_bias = output_bias
        self.backend = backend
        self.w1_EDH = nn.Parameter(torch.empty(num_experts, embed_dims, hidden_dims))
        self.b1_EH = nn.Parameter(torch.empty(num_experts, hidden_dims))
        self.w2_EHD = nn.Parameter(torch.empty(num_experts, hidden_dims, embed_dims))
        b2_ED = torch.empty(num_experts, embed_dims)
        if output_bias:
            self.b2_ED = nn.Parameter(b2_ED)
        else:
            self.register_buffer("b2_ED", b2_ED)
        # One column, to have the shape of nn.PReLU's weight for each expert.
        slope_E1 = torch.empty(num_experts, 1) if activation == PRELU else None
        self.slope_E1 = None if slope_E1 is None else nn.Parameter(slope_E1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all experts anew, each from a stream of its own."""
        for weight_EIO, bias_EO in (
            (self.w1_EDH, self.b1_EH),
            (self.w2_EHD, self.b2_ED),
        ):
            if self.init_std is not None:
                nn.init.trunc_normal_(weight_EIO, std=self.init_std)
                nn.init.zeros_(bias_EO)
                continue
            for weight_IO in weight_EIO.data:
                nn.init.xavier_uniform_(weight_IO)
            bound = weight_EIO.shape[1] ** -0.5
            nn.init.uniform_(bias_EO, -bound, bound)
        if not self.output_bias:
            nn.init.zeros_(self.b2_ED)
        if self.slope_E1 is not None:
            nn.init.constant_(self.slope_E1, PRELU_SLOPE)

    def forward(self, tokens_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Applies each expert to its segment of rows.

        Args:
            tokens_RD: Rows sorted by expert.
            counts_E: Rows of each expert, int64; must sum to R.

        Returns:
            out_RD: In the order of `tokens_RD`, unweighted.
        """
        backend = choose_backend(tokens_RD, self.w1_EDH, backend=self.backend)
        slope_R1 = None
        if self.slope_E1 is not None:
            slope_R1 = spread_over_rows(self.slope_E1, counts_E, tokens_RD.shape[0])
        if backend == "split":
            counts_E = counts_E.cpu()  # a GPU waits for the counts only once
        hidden_RH = grouped_linear(
            tokens_RD, self.w1_EDH, self.b1_EH, counts_E, backend=backend
        )
        out_RD = grouped_linear(
            self.activate(hidden_RH, slope_R1),
            self.w2_EHD,
            self.b2_ED,
            counts_E,
            backend=backend,
        )
        return self._drop(out_RD)

    def forward_expert(self, tokens: Tensor, *, expert: int) -> Tensor:
        """Applies one expert to all tokens, as a dense FFN, without sorting them.

        The other experts get zero gradients.

        Args:
            tokens: (..., D).
            expert: Its number, in [0, E).

        Returns:
            out: Of the same shape.
        """
        slope = () if self.slope_E1 is None else (self.slope_E1[expert],)
        return self._one_expert(
            tokens,
            self.w1_EDH[expert],
            self.b1_EH[expert],
            self.w2_EHD[expert],
            self.b2_ED[expert],
            *slope,
        )

    def activate(self, hidden: Tensor, slope: Tensor | None) -> Tensor:
        """Applies activation and dropout.

        Args:
            hidden: (..., H), of any experts.
            slope: Those of the rows' experts, (..., 1), for PReLU; None for others.

        Returns:
            hidden: Of the same shape.
        """
        if slope is None:
            return self._drop(ACTIVATIONS[self.activation](hidden))
        sloped = slope.to(hidden.dtype) * hidden
        return self._drop(torch.where(hidden > 0, hidden, sloped))

    def extra_repr(self) -> str:
        """Sizes and options, for `print(module)`."""
        return (
            f"num_experts={self.num_experts}, embed_dims={self.embed_dims}, "
            f"hidden_dims={self.hidden_dims}, activation={self.activation!r}"
        )

    def _one_expert(
        self,
        rows_RD: Tensor,
        w1_DH: Tensor,
        b1_H: Tensor,
        w2_HD: Tensor,
        b2_D: Tensor,
        slope_1: Tensor | None = None,
    ) -> Tensor:
        hidden_RH = functional.linear(rows_RD, w1_DH.t(), b1_H)
        hidden_RH = self.activate(hidden_RH, slope_1)
        return self._drop(functional.linear(hidden_RH, w2_HD.t(), b2_D))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, training=self.training)


class SharedExpert(nn.Module):
    """What all datasets have in common, so that routed experts need not repeat it.

    One FFN on every real token, added to the routed output with weight 1 (DeepSeekMoE,
    Dai et al. 2024, arXiv 2401.06066, eq. 9). It is part of no routing: records, losses
    and metrics speak of the routed experts alone.

    Args:
        embed_dims: D.
        hidden_dims: H.
        activation: As in `FFNExperts`.
        dropout: As in `FFNExperts`.

    Raises:
        ValueError: As `FFNExperts` does.
    """

    def __init__(
        self,
        embed_dims: int,
        hidden_dims: int,
        *,
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.expert = FFNExperts(
            1, embed_dims, hidden_dims, activation=activation, dropout=dropout
        )

    def reset_parameters(self) -> None:
        """Draws the expert anew."""
        self.expert.reset_parameters()

    def forward(self, tokens_VD: Tensor) -> Tensor:
        """Applies the expert to all tokens.

        Args:
            tokens_VD: (V, D).

        Returns:
            out_VD: Of the same shape.
        """
        counts_E = torch.full((1,), tokens_VD.shape[0], device=tokens_VD.device)
        return self.expert(tokens_VD, counts_E)
