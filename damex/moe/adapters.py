"""Adapters: small private parts beside an FFN that all tokens share.

A bank of these adds to the shared FFN what is particular to a token's expert. All of
them start at zero, so that the layer starts as the shared FFN whatever the gate says,
and what is zero has a gradient from the first step on (the weights of a gate, and what
stands before the zeros, from the second).

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
    """E linear maps of rank L: x -> x A_e B_e, without bias.

    Low-rank experts of their own for each domain beside a net that all share (MoLA,
    Zhou et al., ICML 2024, arXiv 2406.09679), initialised as LoRA is (Hu et al. 2021,
    arXiv 2106.09685): A uniform in +-1/sqrt(D), B zero. LoRA's factor alpha / rank is
    left out, as with Adam it only scales the learning rate.

    Dtype policy: that of `nn.Linear`, autocast included.

    Args:
        num_experts: E.
        embed_dims: D.
        rank: L; a token costs 2 L D multiply-adds. By default D / 16, rounded up.
        backend: See `damex.moe.grouped.grouped_linear`.

    Raises:
        ValueError: If a size is not positive, the rank is above D, or the back-end is
            unknown.
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
        """Draws A anew and sets B to zero."""
        bound = self.embed_dims**-0.5
        nn.init.uniform_(self.down_EDL, -bound, bound)
        nn.init.zeros_(self.up_ELD)

    def forward(self, tokens_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Applies each expert to its segment of rows.

        Args:
            tokens_RD: Rows sorted by expert.
            counts_E: Rows of each expert, int64; must sum to R.

        Returns:
            out_RD: In the order of `tokens_RD`, unweighted.
        """
        backend = choose_backend(tokens_RD, self.down_EDL, backend=self.backend)
        if backend == "split":
            counts_E = counts_E.cpu()  # a GPU waits for the counts only once
        rows = tokens_RD
        for weight in (self.down_EDL, self.up_ELD):
            rows = grouped_linear(rows, weight, None, counts_E, backend=backend)
        return rows

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return (
            f"num_experts={self.num_experts}, embed_dims={self.embed_dims}, "
            f"rank={self.rank}"
        )


class AffineExperts(nn.Module):
    """E scales and shifts: x -> gamma_e * x + beta_e, both zero at the start.

    Conditioning by feature-wise affine maps (FiLM, Perez et al., AAAI 2018, arXiv
    1709.07871), as the cheapest rival of experts: if it does as well, capacity per
    dataset is not what was missing. Nothing is read on the host.

    Args:
        num_experts: E.
        embed_dims: D; a token costs D multiply-adds, and 2 E D to look its expert up.

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
        """Sets all to zero."""
        nn.init.zeros_(self.gamma_ED)
        nn.init.zeros_(self.beta_ED)

    def forward(self, tokens_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Applies each expert to its segment of rows.

        Args:
            tokens_RD: Rows sorted by expert.
            counts_E: Rows of each expert, int64; must sum to R.

        Returns:
            out_RD: In the order of `tokens_RD`, unweighted.
        """
        both_EF = torch.cat([self.gamma_ED, self.beta_ED], dim=1)
        both_RF = spread_over_rows(both_EF, counts_E, tokens_RD.shape[0])
        gamma_RD, beta_RD = both_RF.chunk(2, dim=1)
        return gamma_RD * tokens_RD + beta_RD

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return f"num_experts={self.num_experts}, embed_dims={self.embed_dims}"
