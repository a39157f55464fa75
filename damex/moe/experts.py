"""Experts, with one tensor per parameter for all of them: FFNs and adapters.

Adapters (`LowRankExperts`) are small corrections per expert, added to an FFN that all
tokens share. They start at zero, so a layer starts as its shared FFN for any gate.

Axes: V real tokens, D model width, H hidden width, L rank, E experts, R rows sorted by
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.errors import check_choice, check_number, check_sizes
from damex.moe.grouped import BACKENDS, choose_backend, grouped_linear, spread_over_rows

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "celu": functional.celu,
        "silu": functional.silu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        # Chen et al. 2022, section 3.2: sigma(z) = z^3; pow is several times slower.
        "cubic": lambda z: z * z * z,
        "identity": lambda z: z,
    }
)
# With a learned slope per expert.
PRELU = "prelu"
PRELU_SLOPE = 0.25  # as in nn.PReLU


class FFNExperts(nn.Module):
    """E feed-forward networks: linear, activation, dropout, linear, dropout.

    Each is the FFN of a DETR without its identity path and is initialized as in mmdet:
    xavier uniform weights for each expert separately (E does not change their scale),
    biases uniform in +-1/sqrt(fan_in). An initializer must not treat the 3-D tensors as
    one matrix; call `reset_parameters` after one that did. Computes in the dtype of
    `nn.Linear`.

    Args:
        activation: One of `ACTIVATIONS`, or 'prelu' with one learned slope per expert.
            Released DAMEX uses 'gelu', DETR 'relu', DAB-DETR 'prelu'; Chen et al. 2022
            compare 'cubic' with linear experts, 'identity'.
        dropout: Probability in [0, 1), applied twice as in the FFN of DETR.
        init_std: Standard deviation of truncated normal weights (timm's, cut at +-2)
            with zero biases, 0.005 in released DAMEX; None for the initialization
            above.
        output_bias: Whether the second bias learns. Otherwise it is a buffer that holds
            zero, or the bias of the dense FFN that is loaded.
        backend: See `damex.moe.grouped.grouped_linear`.
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
        # One column, the shape of nn.PReLU's weight for each expert.
        slope_E1 = torch.empty(num_experts, 1) if activation == PRELU else None
        self.slope_E1 = None if slope_E1 is None else nn.Parameter(slope_E1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize all experts, each with its own random numbers."""
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
        """Apply each expert to its segment of rows; `counts_E` must sum to R."""
        backend = choose_backend(tokens_RD, self.w1_EDH, backend=self.backend)
        slope_R1 = None
        if self.slope_E1 is not None:
            slope_R1 = spread_over_rows(self.slope_E1, counts_E, tokens_RD.shape[0])
        if backend == "split":
            counts_E = counts_E.cpu()  # synchronizes a GPU only once
        run = partial(grouped_linear, counts_E=counts_E, backend=backend)
        hidden_RH = run(tokens_RD, self.w1_EDH, self.b1_EH)
        hidden_RH = self.activate(hidden_RH, slope_R1)
        return self._drop(run(hidden_RH, self.w2_EHD, self.b2_ED))

    def forward_expert(self, tokens: Tensor, *, expert: int) -> Tensor:
        """Apply one expert to all tokens (..., D); the others get zero gradients."""
        slope = None if self.slope_E1 is None else self.slope_E1[expert]
        hidden = functional.linear(tokens, self.w1_EDH[expert].t(), self.b1_EH[expert])
        hidden = self.activate(hidden, slope)
        out = functional.linear(hidden, self.w2_EHD[expert].t(), self.b2_ED[expert])
        return self._drop(out)

    def activate(self, hidden: Tensor, slope: Tensor | None) -> Tensor:
        """Apply activation and dropout to (..., H); PReLU has a slope (..., 1)."""
        if slope is None:
            return self._drop(ACTIVATIONS[self.activation](hidden))
        sloped = slope.to(hidden.dtype) * hidden
        return self._drop(torch.where(hidden > 0, hidden, sloped))

    def extra_repr(self) -> str:
        """Return sizes and options, for `print(module)`."""
        return (
            f"num_experts={self.num_experts}, embed_dims={self.embed_dims}, "
            f"hidden_dims={self.hidden_dims}, activation={self.activation!r}"
        )

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, training=self.training)


class SharedExpert(nn.Module):
    """One FFN for every real token, added to the routed output with weight 1.

    DeepSeekMoE (Dai et al. 2024, arXiv 2401.06066, eq. 9). Records, losses and metrics
    cover the routed experts only.
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
        """Re-initialize the expert."""
        self.expert.reset_parameters()

    def forward(self, tokens_VD: Tensor) -> Tensor:
        """Apply the expert to all tokens."""
        counts_E = torch.full((1,), tokens_VD.shape[0], device=tokens_VD.device)
        return self.expert(tokens_VD, counts_E)


class LowRankExperts(nn.Module):
    """E linear maps of rank L without bias, x -> x A_e B_e.

    MoLA (Zhou et al., ICML 2024, arXiv 2406.09679), initialized as LoRA (Hu et al.
    2021, arXiv 2106.09685): A uniform in +-1/sqrt(D), B zero. LoRA's factor alpha /
    rank is omitted, as with Adam it only scales the learning rate. `rank` is L, at most
    D, by default ceil(D / 16), for 2 L D multiply-adds per token. Computes in the dtype
    of `nn.Linear`.
    """

    needs_shared_expert: ClassVar[bool] = True
    expert_rows = ("down_EDL", "up_ELD")
    output_names: ClassVar[tuple[str, ...]] = ("up_ELD",)

    def __init__(
        self,
        num_experts: int,
        embed_dims: int,
        rank: int | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if rank is None:
            rank = -(-embed_dims // 16)
        check_sizes(
            "LowRankExperts", num_experts=num_experts, embed_dims=embed_dims, rank=rank
        )
        if rank > embed_dims:
            raise ValueError(
                f"LowRankExperts: rank must be at most embed_dims={embed_dims}, beyond "
                f"which a map gains nothing, got {rank}"
            )
        check_choice("LowRankExperts", BACKENDS, backend=backend)
        self.num_experts = num_experts
        self.embed_dims = embed_dims
        self.rank = rank
        self.backend = backend
        self.down_EDL = nn.Parameter(torch.empty(num_experts, embed_dims, rank))
        self.up_ELD = nn.Parameter(torch.empty(num_experts, rank, embed_dims))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize A and set B to zero."""
        bound = self.embed_dims**-0.5
        nn.init.uniform_(self.down_EDL, -bound, bound)
        nn.init.zeros_(self.up_ELD)

    def forward(self, tokens_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply each expert to its segment of rows; `counts_E` must sum to R."""
        backend = choose_backend(tokens_RD, self.down_EDL, backend=self.backend)
        if backend == "split":
            counts_E = counts_E.cpu()  # synchronizes a GPU only once
        rows = tokens_RD
        for weight in (self.down_EDL, self.up_ELD):
            rows = grouped_linear(rows, weight, None, counts_E, backend=backend)
        return rows

    def extra_repr(self) -> str:
        """Return the sizes, for `print(module)`."""
        return (
            f"num_experts={self.num_experts}, embed_dims={self.embed_dims}, "
            f"rank={self.rank}"
        )
