"""Lemma 1 made visible: more and more data sets, and no more experts.

Axes: B samples, P patches, D features, E experts, G data sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Adam

from damex.moe import (
    coefficient_of_variation,
    dispatch_counts,
    dispatch_entropy,
    mutual_information,
    own_expert_counts,
)
from damex.studies.cluster_data import (
    SETTINGS,
    ClusterSamples,
    ClusterTask,
    draw_task,
)
from damex.studies.damex2023.model import ClusterMoE, Method

__all__ = ["Mixing", "Outcome", "datasets_of", "draw_mixture", "evaluate", "train"]

# Disturbing signals are as strong as those of labels: the case of Theorem 4.1.
STRENGTHS = SETTINGS["3"]


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Sizes of the experiment.

    Attributes:
        dims: D.
        num_experts: E, whatever the number of data sets.
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
        imbalance: `coefficient_of_variation` of the experts' load.
        counts_GE: Samples by data set and expert.
    """

    accuracy: float
    entropy: float
    information: float
    routing: float
    imbalance: float
    counts_GE: Tensor


def draw_mixture(
    mixing: Mixing, num_datasets: int, *, shared: bool, generator: torch.Generator
) -> ClusterTask:
    """Data sets with clusters of their own.

    Args:
        mixing: Sizes.
        num_datasets: G.
        shared: Whether what disturbs a sample comes from any cluster of the mixture;
            from its own data set otherwise, so that each data set for itself is one of
            Definition 3.1.
        generator: Of the directions.
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
    """Trains one mixture of experts on one mixture of data sets.

    Args:
        task: The data sets.
        mixing: Sizes.
        method: Which losses.
        seed: Of samples, weights and gate noise.

    Returns:
        The model in evaluation.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = task.draw(mixing.num_samples, generator)
    datasets_B = datasets_of(samples, mixing)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ClusterMoE(
            method,
            dims=mixing.dims,
            num_datasets=task.num_clusters // mixing.clusters,
            num_experts=mixing.num_experts,
            hidden_dims=mixing.hidden_dims,
        )
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
    """Tests a model; data sets are told to metrics only.

    Args:
        model: In evaluation.
        samples: To test with.
        mixing: Sizes.
    """
    score_B, record = model(samples.patches_BPD, datasets_of(samples, mixing))
    right_B = (score_B > 0) == (samples.labels_B > 0)
    counts_GE = dispatch_counts(record)
    hits_G, tokens_G = own_expert_counts(record)
    return Outcome(
        accuracy=100.0 * right_B.double().mean().item(),
        entropy=dispatch_entropy(counts_GE).item(),
        information=mutual_information(counts_GE).item(),
        routing=100.0 * (hits_G.sum() / tokens_G.sum()).item(),
        imbalance=coefficient_of_variation(counts_GE.sum(0)).item(),
        counts_GE=counts_GE,
    )
