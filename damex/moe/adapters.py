"""Adapters: small per-expert corrections added to an FFN that all tokens share.

All start at zero, so a layer starts as its shared FFN for any gate; what is zero has a
gradient from the first step on, all else from the second.

Axes: D model width, L rank, E experts, R rows sorted by expert.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from damex.errors import check_choice, check_sizes
from damex.moe.grouped import (
    BACKENDS,
    choose_backend,
    grouped_linear,
    spread_over_rows,
)


class LowRankExperts(nn.Module):
    """E linear maps of rank L without bias, x -> x A_e B_e.

    MoLA (Zhou et al., ICML 2024, arXiv 2406.09679), initialized as LoRA (Hu et al.
    2021, arXiv 2106.09685): A uniform in +-1/sqrt(D), B zero. LoRA's factor alpha /
    rank is omitted, as with Adam it only scales the learning rate. Computes in the
    dtype of `nn.Linear`, autocast included.

    Args:
        num_experts: E.
        embed_dims: D.
        rank: L, at most D, by default ceil(D / 16); 2 L D multiply-adds per token.
        backend: See `damex.moe.grouped.grouped_linear`.

    Raises:
        ValueError: If a size is not positive, L > D, or the backend is unknown.
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
                f"which a map is no richer, got {rank}"
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
            counts_E = counts_E.cpu()  # a GPU waits for the counts only once
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


class AffineExperts(nn.Module):
    """E scales and shifts, x -> gamma_e * x + beta_e, all zero at the start.

    FiLM (Perez et al., AAAI 2018, arXiv 1709.07871), as the cheapest baseline of
    experts. D multiply-adds per token and 2 E D to look up its expert; the host is not
    synchronized.

    Args:
        num_experts: E.
        embed_dims: D.

    Raises:
        ValueError: If a size is not positive.
    """

    needs_shared_expert: ClassVar[bool] = True
    expert_rows = ("gamma_ED", "beta_ED")
    output_names: ClassVar[tuple[str, ...]] = ("gamma_ED", "beta_ED")

    def __init__(self, num_experts: int, embed_dims: int) -> None:
        super().__init__()
        check_sizes("AffineExperts", num_experts=num_experts, embed_dims=embed_dims)
        self.num_experts = num_experts
        self.embed_dims = embed_dims
        self.gamma_ED = nn.Parameter(torch.empty(num_experts, embed_dims))
        self.beta_ED = nn.Parameter(torch.empty(num_experts, embed_dims))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to zero."""
        nn.init.zeros_(self.gamma_ED)
        nn.init.zeros_(self.beta_ED)

    def forward(self, tokens_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply each expert to its segment of rows; `counts_E` must sum to R."""
        both_EF = torch.cat([self.gamma_ED, self.beta_ED], dim=1)
        both_RF = spread_over_rows(both_EF, counts_E, tokens_RD.shape[0])
        gamma_RD, beta_RD = both_RF.chunk(2, dim=1)
        return gamma_RD * tokens_RD + beta_RD

    def extra_repr(self) -> str:
        """Return the sizes, for `print(module)`."""
        return f"num_experts={self.num_experts}, embed_dims={self.embed_dims}"
