"""The expert that every token passes, beside those it is routed to.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, V valid tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from damex.moe.experts import FFNExperts


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

    def forward(self, tokens_TD: Tensor, token_mask_T: Tensor | None = None) -> Tensor:
        """Applies the expert to all real tokens.

        Args:
            tokens_TD: (T, D).
            token_mask_T: True for real tokens; None when all are real.

        Returns:
            out_TD: Padded tokens are exactly zero.
        """
        if token_mask_T is None:
            return self._apply_expert(tokens_TD)
        index_V = token_mask_T.nonzero().squeeze(1)
        out_VD = self._apply_expert(tokens_TD.index_select(0, index_V))
        zeros_TD = out_VD.new_zeros(tokens_TD.shape[0], out_VD.shape[1])
        return zeros_TD.index_copy(0, index_V, out_VD)

    def _apply_expert(self, tokens_VD: Tensor) -> Tensor:
        counts_E = torch.full((1,), tokens_VD.shape[0], device=tokens_VD.device)
        return self.expert(tokens_VD, counts_E)
