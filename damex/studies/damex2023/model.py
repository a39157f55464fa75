"""A mixture of experts over samples of four patches, out of the detector's own parts.

Axes: B samples, P = 4 patches, D features of a patch, E experts, R routes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from damex.moe import (
    DatasetRoutingLoss,
    ExpertCapacity,
    FFNExperts,
    ImportanceLoss,
    LinearRouter,
    LoadBalanceLoss,
    MoELayer,
    RoutingLoss,
    RoutingRecord,
    TopKGate,
)
from damex.studies.patch_sum_router import PatchSumRouter

__all__ = [
    "NUM_PATCHES",
    "ROUTER_STD",
    "ClusterMoE",
    "Method",
    "damex_layer",
    "dataset_experts",
]

Method = Literal["vanilla", "damex"]
NUM_PATCHES = 4
ROUTER_STD = 0.005  # DAMEX's


class _PatchSumExperts(nn.Module):
    """f_m(x) = sum_p FFN_m(x_p) with cubic units (Chen et al. 2022)."""

    def __init__(self, num_experts: int, dims: int, hidden_dims: int) -> None:
        super().__init__()
        self.ffn = FFNExperts(num_experts, dims, hidden_dims, activation="cubic")
        self.num_experts = num_experts

    def reset_parameters(self) -> None:
        self.ffn.reset_parameters()

    def forward(self, samples_RD: Tensor, counts_E: Tensor) -> Tensor:
        patches = samples_RD.reshape(len(samples_RD) * NUM_PATCHES, -1)
        out = self.ffn(patches, counts_E * NUM_PATCHES)
        return out.unflatten(0, (-1, NUM_PATCHES)).sum(dim=1)


class ClusterMoE(nn.Module):
    """One MoE layer and a readout without bias; top-1, as DAMEX has it.

    Both methods have the same parts and parameters. DAMEX adds its loss, the vanilla
    mixture importance and load balance at 0.05 each, as configs/_base_/moe/vanilla.py.
    (DAMEX's baseline has the smooth load loss in place of the load balance.)

    Args:
        method: 'vanilla' or 'damex'.
        dims: D.
        num_datasets: Data sets that are mixed.
        num_experts: E.
        hidden_dims: Filters of each expert.
        capacity: Places of an expert; None drops nothing.
    """

    def __init__(
        self,
        method: Method,
        *,
        dims: int,
        num_datasets: int,
        num_experts: int,
        hidden_dims: int,
        capacity: ExpertCapacity | None = None,
    ) -> None:
        super().__init__()
        losses: tuple[RoutingLoss, ...] = (DatasetRoutingLoss(weight=0.1),)
        if method == "vanilla":
            losses = (ImportanceLoss(weight=0.05), LoadBalanceLoss(weight=0.05))
        self.layer = MoELayer(
            router=PatchSumRouter(num_experts, dims, init_std=ROUTER_STD),
            gate=TopKGate(noise="gaussian", capacity=capacity),
            experts=_PatchSumExperts(num_experts, dims, hidden_dims),
            losses=losses,
            group_experts=dataset_experts(num_datasets, num_experts),
        )
        self.readout = nn.Linear(dims, 1, bias=False)

    def forward(
        self, patches_BPD: Tensor, datasets_B: Tensor | None = None
    ) -> tuple[Tensor, RoutingRecord]:
        """Labels samples, each an image with one token.

        Args:
            patches_BPD: Samples.
            datasets_B: Their data sets; read by losses in training only.

        Returns:
            score_B: Positive for the label 1.
            record: What was routed.
        """
        tokens_B1D = patches_BPD.flatten(1).unsqueeze(1)
        out_B1D, record = self.layer(tokens_B1D, group_ids_B=datasets_B)
        score_B11: Tensor = self.readout(out_B1D)
        return score_B11.flatten(), record


def dataset_experts(num_datasets: int, num_experts: int) -> list[list[int]]:
    """Experts of each data set: shared out evenly, in order.

    Args:
        num_datasets: One of the divisors or multiples of `num_experts`.
        num_experts: E.
    """
    if num_datasets >= num_experts:
        return [[d * num_experts // num_datasets] for d in range(num_datasets)]
    share = num_experts // num_datasets
    return [list(range(d * share, (d + 1) * share)) for d in range(num_datasets)]


def damex_layer(
    dims: int,
    num_datasets: int,
    *,
    seed: int,
    capacity: ExpertCapacity | None = None,
) -> MoELayer:
    """A DAMEX layer with one expert per data set.

    Args:
        dims: D.
        num_datasets: Data sets, and experts.
        seed: Of the parameters; the global generator is left as it was.
        capacity: Of an expert; None drops no token.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MoELayer(
            router=LinearRouter(dims, num_datasets, init_std=ROUTER_STD),
            gate=TopKGate(noise="gaussian", capacity=capacity),
            experts=FFNExperts(num_datasets, dims, dims),
            losses=[DatasetRoutingLoss(weight=0.1)],
            group_experts=dataset_experts(num_datasets, num_datasets),
        )
