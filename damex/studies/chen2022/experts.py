"""The paper's experts: small CNNs whose patches are summed (eq. 3.1).

Axes: T samples (a sample is one token), P patches of a sample, D numbers in a patch,
E experts, F filters of an expert, C outputs, R routes (sample-expert pairs).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from damex.moe.experts import ACTIVATIONS
from damex.moe.grouped import map_runs

__all__ = ["PatchwiseExperts"]


class PatchwiseExperts(nn.Module):
    """E functions sum_j sum_p sigma(<w_j, x_p> + b_j), for each of C outputs.

    Output c sums the c-th part of the filters. The outputs stand where a layer expects
    tokens, so the layer answers (B, N, C).

    Args:
        num_experts: E; 1 for a single model.
        patch_dims: D.
        num_filters: F, a multiple of C.
        num_outputs: C.
        activation: sigma, one of `damex.moe.experts.ACTIVATIONS`.
        bias: Whether filters have a bias; the paper has none, its code has.
        init: 'normal' for N(0, init_scale^2), or 'uniform' for init_scale times what
            `nn.Conv1d` draws, U(+-1/sqrt(D)).
        init_scale: See there.
    """

    def __init__(
        self,
        num_experts: int,
        patch_dims: int,
        num_filters: int,
        *,
        num_outputs: int = 1,
        activation: str = "cubic",
        bias: bool = False,
        init: str = "normal",
        init_scale: float = 0.001,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.num_outputs = num_outputs
        self.activation = activation
        self.init = init
        self.init_scale = init_scale
        shape = (num_experts, patch_dims, num_filters)
        self.weight_EDF = nn.Parameter(torch.empty(shape))
        empty_EF = torch.empty(num_experts, num_filters)
        self.bias_EF = nn.Parameter(empty_EF) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all experts anew."""
        for parameter in self.parameters():
            if self.init == "normal":
                nn.init.normal_(parameter, std=self.init_scale)
            else:
                bound = self.init_scale * self.weight_EDF.shape[1] ** -0.5
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, tokens_RX: Tensor, counts_E: Tensor) -> Tensor:
        """Applies each expert to its run of samples.

        Args:
            tokens_RX: Flattened patches (X = P*D), sorted by expert.
            counts_E: Samples of each expert, int64; must sum to R.

        Returns:
            out_RC: In the order of the rows, unweighted.
        """
        parameters = [self.weight_EDF]
        if self.bias_EF is not None:
            parameters.append(self.bias_EF)
        expert = self._linear if self.activation == "identity" else self._nonlinear
        return map_runs(expert, tokens_RX, parameters, counts_E)

    def _nonlinear(
        self, rows_RX: Tensor, weight_DF: Tensor, bias_F: Tensor | None = None
    ) -> Tensor:
        patches_SD = rows_RX.reshape(-1, weight_DF.shape[0])
        hidden_SF = nn.functional.linear(patches_SD, weight_DF.t(), bias_F)
        hidden_SF = ACTIVATIONS[self.activation](hidden_SF)
        parts = hidden_SF.view(len(rows_RX), -1, self.num_outputs, self._part)
        return parts.sum((1, 3))

    def _linear(
        self, rows_RX: Tensor, weight_DF: Tensor, bias_F: Tensor | None = None
    ) -> Tensor:
        """As `_nonlinear`, with the sums over patches and filters taken first."""
        patches_RPD = rows_RX.unflatten(1, (-1, weight_DF.shape[0]))
        weight_DC = weight_DF.unflatten(1, (-1, self._part)).sum(2)
        out_RC = patches_RPD.sum(1) @ weight_DC
        if bias_F is not None:
            bias_C = bias_F.unflatten(0, (-1, self._part)).sum(1)
            out_RC = out_RC + patches_RPD.shape[1] * bias_C
        return out_RC

    @property
    def _part(self) -> int:
        """Filters of one output."""
        return self.weight_EDF.shape[2] // self.num_outputs
