"""A mixture of experts, out of the detector's own parts, on a mixture of data sets.

Axes: B samples, P = 4 patches, D features of a patch, E experts, R routes, G data sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam

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
    dispatch_counts,
    dispatch_entropy,
    expert_groups,
    mutual_information,
    routing_hits,
)
from studies.cluster_data import (
    NUM_PATCHES,
    SETTINGS,
    ClusterSamples,
    ClusterTask,
    PatchSumRouter,
    draw_task,
)
from studies.harness import seeded

Method = Literal["vanilla", "damex"]
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
    """

    def __init__(self, method: Method, mixing: Mixing, num_datasets: int) -> None:
        super().__init__()
        dims, num_experts = mixing.dims, mixing.num_experts
        losses: tuple[RoutingLoss, ...] = (DatasetRoutingLoss(weight=0.1),)
        if method == "vanilla":
            losses = (ImportanceLoss(weight=0.05), LoadBalanceLoss(weight=0.05))
        self.layer = MoELayer(
            router=PatchSumRouter(dims, num_experts, init_std=ROUTER_STD),
            gate=TopKGate(noise="gaussian"),
            experts=_PatchSumExperts(num_experts, dims, mixing.hidden_dims),
            losses=losses,
            group_experts=dataset_experts(num_datasets, num_experts),
        )
        self.readout = nn.Linear(dims, 1, bias=False)

    def forward(
        self, patches_BPD: Tensor, datasets_B: Tensor | None = None
    ) -> tuple[Tensor, RoutingRecord]:
        """Score samples, each an image with one token; positive for the label 1."""
        tokens_B1D = patches_BPD.flatten(1).unsqueeze(1)
        out_B1D, record = self.layer(tokens_B1D, group_ids_B=datasets_B)
        score_B11: Tensor = self.readout(out_B1D)
        return score_B11.flatten(), record


def dataset_experts(num_datasets: int, num_experts: int) -> Sequence[Sequence[int]]:
    """Experts of each data set: shared out evenly, in order."""
    if num_datasets > num_experts:
        return [[d * num_experts // num_datasets] for d in range(num_datasets)]
    return expert_groups(num_datasets, num_experts)


def damex_layer(
    dims: int,
    num_datasets: int,
    *,
    seed: int,
    capacity: ExpertCapacity | None = None,
) -> MoELayer:
    """A DAMEX layer with one expert per data set; no drops if `capacity` is None."""
    with seeded(seed):
        return MoELayer(
            router=LinearRouter(dims, num_datasets, init_std=ROUTER_STD),
            gate=TopKGate(noise="gaussian", capacity=capacity),
            experts=FFNExperts(num_datasets, dims, dims),
            losses=[DatasetRoutingLoss(weight=0.1)],
            group_experts=dataset_experts(num_datasets, num_datasets),
        )


# Disturbing signals are as strong as those of labels: the case of Theorem 4.1.
STRENGTHS = SETTINGS["3"]


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Sizes of the experiment.

    Attributes:
        dims: D.
        num_experts: E, for any number of data sets.
        hidden_dims: Filters of each expert.
        clusters: Clusters of each data set.
        num_samples: Training samples of the whole mixture, and as many test samples.
        steps: Of Adam.
        batch_size: Samples.
        lr: Of Adam.
    """

    dims: int = 64
    num_experts: int = 8
    hidden_dims: int = 16
    clusters: int = 4
    num_samples: int = 8000
    steps: int = 400
    batch_size: int = 512
    lr: float = 0.01


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a trained mixture does with test samples.

    Attributes:
        accuracy: In percent.
        entropy: `dispatch_entropy` of data sets in experts, in nats.
        information: `mutual_information` of data set and expert, in nats.
        routing: Samples at an expert of their own data set, in percent.
        counts_GE: Samples by data set and expert.
    """

    accuracy: float
    entropy: float
    information: float
    routing: float
    counts_GE: Tensor


def draw_mixture(
    mixing: Mixing, num_datasets: int, *, shared: bool, generator: torch.Generator
) -> ClusterTask:
    """Data sets with clusters of their own.

    What disturbs a sample comes from any cluster of the mixture if `shared`, else from
    its own data set, so that each data set for itself is one of Definition 3.1.
    """
    return draw_task(
        STRENGTHS,
        generator,
        num_clusters=mixing.clusters * num_datasets,
        dims=mixing.dims,
        num_groups=1 if shared else num_datasets,
    )


def datasets_of(samples: ClusterSamples, mixing: Mixing) -> Tensor:
    """Data set of each sample, (B,) int64."""
    return samples.clusters_B // mixing.clusters


def train(
    task: ClusterTask, mixing: Mixing, method: Method, *, seed: int
) -> ClusterMoE:
    """Train a model on a mixture of data sets; it is left in evaluation."""
    generator = torch.Generator().manual_seed(seed)
    samples = task.draw(mixing.num_samples, generator)
    datasets_B = datasets_of(samples, mixing)
    with seeded(seed):
        model = ClusterMoE(method, mixing, task.num_clusters // mixing.clusters)
        optimizer = Adam(model.parameters(), lr=mixing.lr)
        for _ in range(mixing.steps):
            index_B = torch.randint(
                mixing.num_samples, (mixing.batch_size,), generator=generator
            )
            score_B, record = model(samples.patches_BPD[index_B], datasets_B[index_B])
            loss = functional.softplus(-samples.labels_B[index_B] * score_B).mean()
            loss = loss + torch.stack(list(record.losses.values())).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def evaluate(model: ClusterMoE, samples: ClusterSamples, mixing: Mixing) -> Outcome:
    """Test a model; the data sets are given to the metrics only."""
    score_B, record = model(samples.patches_BPD, datasets_of(samples, mixing))
    right_B = (score_B > 0) == (samples.labels_B > 0)
    counts_GE = dispatch_counts(record)
    hits_G, tokens_G = routing_hits(record)
    return Outcome(
        accuracy=100.0 * right_B.double().mean().item(),
        entropy=dispatch_entropy(counts_GE).item(),
        information=mutual_information(counts_GE).item(),
        routing=100.0 * (hits_G.sum() / tokens_G.sum()).item(),
        counts_GE=counts_GE,
    )
