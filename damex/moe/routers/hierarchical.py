"""The two-level router: first a group of experts, then an expert of the group.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups,
S experts in the largest group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe.groups import expert_groups
from damex.moe.routers.precision import check_sizes, full_precision_linear


class HierarchicalRouter(nn.Module):
    """Logits as log softmax over groups + log softmax inside of the group.

    The softmax over all experts is then the product of the two levels (Nguyen et al.
    2025, arXiv 2503.03213, eq. 20), and any gate can follow. Groups are those of
    `damex.moe.expert_groups`, as a layer's dataset groups are: `DatasetRoutingLoss`
    then teaches the first level alone, and the second is free to divide a dataset's
    tokens between its experts.

    Dtype policy: that of `LinearRouter`.

    Args:
        embed_dims: D.
        num_experts: E, at least G.
        num_groups: G.
        init_std: Standard deviation of the normal initial weights of both levels; the
            biases start at zero.

    Raises:
        ValueError: If a size is not positive, there are more groups than experts, or
            `init_std` is negative.
    """

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
        if not init_std >= 0.0:
            raise ValueError(
                f"HierarchicalRouter: init_std must be >= 0, got {init_std}"
            )
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
        # Groups laid out side by side in rows of S; slots left over point to a column E
        # of minus infinity.
        rows = [[*group, *[num_experts] * (width - len(group))] for group in groups]
        slot_GS = torch.tensor(rows)
        self.register_buffer("slot_GS", slot_GS, persistent=False)
        place_E = (slot_GS.flatten() < num_experts).nonzero().squeeze(1)
        self.register_buffer("place_E", place_E, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew and zeroes the biases."""
        for weight in (self.group_weight_GD, self.weight_ED):
            nn.init.normal_(weight, std=self.init_std)
        for bias in (self.group_bias_G, self.bias_E):
            nn.init.zeros_(bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores every expert for every token.

        Args:
            tokens: (..., D).

        Returns:
            logits: (..., E), float32 (float64 for float64 input); log probabilities,
                whose exponentials sum to 1.
        """
        group = full_precision_linear(tokens, self.group_weight_GD, self.group_bias_G)
        inner = full_precision_linear(tokens, self.weight_ED, self.bias_E)
        inner = functional.pad(inner, (0, 1), value=-torch.inf)
        inner = inner.index_select(-1, self.slot_GS.flatten())
        inner = torch.log_softmax(inner.unflatten(-1, self.slot_GS.shape), dim=-1)
        both = torch.log_softmax(group, dim=-1).unsqueeze(-1) + inner
        return both.flatten(-2).index_select(-1, self.place_E)

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return (
            f"embed_dims={self.embed_dims}, num_experts={self.num_experts}, "
            f"num_groups={self.num_groups}, init_std={self.init_std}"
        )
