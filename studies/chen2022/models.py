"""The data and the mixtures: the paper as printed, and the authors' code.

The two differ in more than a constant, and the published accuracies come from the code.

Axes: B samples (a sample is one token), P patches of a sample, D numbers in a patch,
E experts, F filters of an expert, C outputs, R routes (sample-expert pairs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe import (
    Assignment,
    Gate,
    LoadBalanceLoss,
    MoELayer,
    Packing,
    RoutingLoss,
    RoutingRecord,
    TopKGate,
)
from damex.moe.experts import ACTIVATIONS
from damex.moe.grouped import map_segments
from studies.cluster_data import (
    SETTINGS,
    ClusterSamples,
    ClusterTask,
    PatchSumRouter,
    draw_task,
)

NUM_CLUSTERS = 4
PATCH_DIMS = 50


def draw_setting(setting: str, generator: torch.Generator) -> ClusterTask:
    """Draw the directions of a task."""
    return draw_task(
        SETTINGS[setting], generator, num_clusters=NUM_CLUSTERS, dims=PATCH_DIMS
    )


def draw_train_and_test(
    setting: str, num: int, seed: int
) -> tuple[ClusterSamples, ClusterSamples]:
    """Training and test data of equal size, new for each seed."""
    generator = torch.Generator().manual_seed(seed)
    task = draw_setting(setting, generator)
    return task.draw(num, generator), task.draw(num, generator)


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
        init: 'normal' for N(0, init_scale^2), or 'uniform' for init_scale times
            U(+-1/sqrt(D)), the distribution of `nn.Conv1d`.
        init_scale: Scale of `init`.
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
        """Draw new weights of all experts."""
        for parameter in self.parameters():
            if self.init == "normal":
                nn.init.normal_(parameter, std=self.init_scale)
            else:
                bound = self.init_scale * self.weight_EDF.shape[1] ** -0.5
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, tokens_RX: Tensor, counts_E: Tensor) -> Tensor:
        """Apply each expert to its run of samples with X = P*D numbers, unweighted."""
        parameters = [self.weight_EDF]
        if self.bias_EF is not None:
            parameters.append(self.bias_EF)
        expert = self._linear if self.activation == "identity" else self._nonlinear
        return map_segments(expert, tokens_RX, parameters, counts_E)

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
        """Number of filters of one output."""
        return self.weight_EDF.shape[2] // self.num_outputs


NUM_EXPERTS = 8
NUM_FILTERS = 16
BALANCE_WEIGHT = 1e-4


@dataclass(frozen=True)
class Recipe:
    """One of the forms in which the experiment exists.

    Attributes:
        name: How it is called in the report.
        input_scale: Factor on all patches.
        as_released: Whether model, loss and optimizer are those of the code: the raw
            noisy logit weighs the expert, two logits with biases, a softmax before the
            cross-entropy, the sum of norms, noise at test time, early stop. Otherwise
            those of sections 3.2 and 3.3.
        steps: Full-batch steps.
    """

    name: str
    input_scale: float = 1.0
    as_released: bool = False
    steps: int = 500


PAPER = Recipe("paper")
PAPER_X10 = Recipe("paper, inputs x10", input_scale=10.0)
OFFICIAL = Recipe("official_code", input_scale=10.0, as_released=True, steps=501)


class RawLogitGate(Gate):
    """Top-1 of the released code: the noisy logit itself weighs the route."""

    def forward(self, logits_VE: Tensor, packing: Packing | None = None) -> Assignment:
        """Add U[0, 1), whether in training or not, and take the largest."""
        noisy_VE = logits_VE + torch.rand_like(logits_VE)
        routes = TopKGate(1)(noisy_VE, packing)
        weight_R = noisy_VE[routes.token_index_R, routes.expert_index_R]
        return replace(routes, weight_R=weight_R)


@dataclass(frozen=True, kw_only=True)
class LogitBalanceLoss(RoutingLoss):
    """As `LoadBalanceLoss`, of mean logits, not probabilities (released)."""

    weight: float = BALANCE_WEIGHT
    name: str = "load_balance"

    def compute(
        self, logits_VE: Tensor, record: RoutingRecord, index_V: Tensor | None
    ) -> Tensor:
        """E sum_e f_e mean(h_e), f_e being the share of expert e."""
        share_E = record.assignment.counts_E / record.assignment.counts_E.sum()
        return NUM_EXPERTS * (share_E * logits_VE.mean(0)).sum()


def build_mixture(
    recipe: Recipe, activation: str, *, balance: bool = False
) -> MoELayer:
    """A new mixture; `balance` adds the load balance loss (Table 9)."""
    gate: Gate
    loss: RoutingLoss
    if recipe.as_released:
        gate = RawLogitGate()
        experts = PatchwiseExperts(
            NUM_EXPERTS,
            PATCH_DIMS,
            NUM_FILTERS,
            num_outputs=2,
            activation=activation,
            bias=True,
            init="uniform",
        )
        loss = LogitBalanceLoss()
    else:
        gate = TopKGate(1, noise="uniform")
        experts = PatchwiseExperts(
            NUM_EXPERTS, PATCH_DIMS, NUM_FILTERS, activation=activation
        )
        loss = LoadBalanceLoss(weight=BALANCE_WEIGHT)
    return MoELayer(
        router=PatchSumRouter(PATCH_DIMS, NUM_EXPERTS, init_std=0.0),
        gate=gate,
        experts=experts,
        losses=[loss] if balance else [],
        # Clusters are there to be counted only: all of them may use all experts.
        group_experts=[range(NUM_EXPERTS)] * NUM_CLUSTERS,
    )


def mixture_loss(recipe: Recipe, out_BC: Tensor, labels_B: Tensor) -> Tensor:
    """Mean loss of eq. 3.3 (C = 1), or of the code (C = 2), for labels -1.0 or 1.0."""
    if recipe.as_released:
        # The code hands probabilities to a cross-entropy that takes logits.
        probs_BC = out_BC.softmax(1)
        return functional.cross_entropy(probs_BC, (labels_B > 0).long())
    return functional.softplus(-labels_B * out_BC.squeeze(1)).mean()


def class_margin(out_BC: Tensor) -> Tensor:
    """Positive where label 1 is predicted, from one or two outputs, (B,)."""
    if out_BC.shape[1] == 1:
        return out_BC.squeeze(1)
    return out_BC[:, 1] - out_BC[:, 0]
