"""Three faults of DAMEX's released code, with and without, on tokens.

Read in the code at github.com/jinga-lala/DAMEX, commit 20ded9d.

Axes: B images, N tokens per image, T = B*N tokens, D features, E experts, G data sets,
C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam

from damex.moe import (
    DatasetRoutingLoss,
    ExpertCapacity,
    MoELayer,
    TopKGate,
    dropped_counts,
    routing_hits,
)
from studies.cluster_data import ClusterTask
from studies.damex2023.mixing import damex_layer
from studies.harness import seeded

QUERIES = 900
LR = 0.01


@dataclass(frozen=True)
class Routing:
    """How well a router has learned.

    Attributes:
        wrong_targets: Share of the targets it learned from that were wrong, percent.
        accuracy: Tokens that go to the expert of their data set, percent.
        confidence: Mean probability of that expert, percent.
    """

    wrong_targets: float
    accuracy: float
    confidence: float


def draw_images(
    task: ClusterTask,
    datasets_B: Tensor,
    num_tokens: int,
    generator: torch.Generator,
) -> Tensor:
    """Tokens of images: samples of the image's group of clusters, patches added up."""
    per_dataset = task.num_clusters // task.num_groups
    tokens = []
    for dataset in datasets_B.tolist():
        # A data set is drawn by leaving the others' clusters out.
        drawn = task.draw(2 * num_tokens * task.num_groups, generator)
        own_B = drawn.clusters_B // per_dataset == dataset
        tokens.append(drawn.patches_BPD[own_B][:num_tokens].sum(dim=1))
    return torch.stack(tokens)


def targets_accuracy(
    task: ClusterTask,
    *,
    released: bool,
    steps: int,
    num_tokens: int,
    seed: int,
) -> Routing:
    """Train a router with two images of two data sets per device.

    The released code flattens logits query by query and targets image by image. The
    task's groups of clusters are the data sets, each with an expert.
    """
    generator = torch.Generator().manual_seed(seed)
    num_datasets = task.num_groups
    layer = damex_layer(task.signals_KD.shape[1], num_datasets, seed=seed)
    optimizer = Adam(layer.get_submodule("router").parameters(), lr=LR)
    wrong = 0.0
    layer.train()
    for _ in range(steps):
        datasets_B = torch.randperm(num_datasets, generator=generator)[:2]
        tokens_BND = draw_images(task, datasets_B, num_tokens, generator)
        record = layer.route(tokens_BND, group_ids_B=datasets_B)
        logits_BNE = record.packing.unpack(record.logits_VE)
        true_BN = datasets_B.unsqueeze(1).expand(-1, num_tokens)
        if released:
            logits_BNE, true_BN = logits_BNE.transpose(0, 1), true_BN.t()
        targets_T = datasets_B.repeat_interleave(num_tokens)
        wrong += (targets_T != true_BN.flatten()).double().mean().item() / steps
        loss = DatasetRoutingLoss()(replace(record, logits_VE=logits_BNE.flatten(0, 1)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    datasets_B = torch.arange(num_datasets)
    tokens_BND = draw_images(task, datasets_B, QUERIES, generator)
    accuracy, confidence = _quality(layer, tokens_BND, datasets_B)
    return Routing(100.0 * wrong, accuracy, confidence)


def capacity_curve(
    task: ClusterTask,
    *,
    capacity: ExpertCapacity | None,
    steps: int,
    every: int,
    seed: int,
) -> list[tuple[float, float]]:
    """Watch what is dropped while a router learns from one image per device.

    Returns routing accuracy and dropped tokens, both in percent, every few steps.
    """
    generator = torch.Generator().manual_seed(seed)
    num_datasets, dims = task.num_groups, task.signals_KD.shape[1]
    layer = damex_layer(dims, num_datasets, seed=seed, capacity=capacity)
    optimizer = Adam(layer.get_submodule("router").parameters(), lr=LR)
    all_B = torch.arange(num_datasets)
    looks_BND = draw_images(task, all_B, QUERIES, generator)
    curve = []
    for step in range(steps + 1):
        if step % every == 0:
            accuracy, _ = _quality(layer, looks_BND, all_B)
            curve.append((accuracy, _dropped(layer, looks_BND)))
        layer.train()
        datasets_B = torch.randint(num_datasets, (1,), generator=generator)
        tokens_BND = draw_images(task, datasets_B, QUERIES // 10, generator)
        record = layer.route(tokens_BND, group_ids_B=datasets_B)
        optimizer.zero_grad()
        record.losses["dataset_routing"].backward()
        optimizer.step()
    return curve


def label_accuracy(
    task: ClusterTask, *, by_name: bool, marked: bool, steps: int, seed: int
) -> float:
    """Classify tokens of two data sets that number the same classes differently.

    A token is the centre of its class, a cluster of the task, and noise. The second
    data set calls class c what the first calls c + 1. The released code trains each
    data set's own numbers; `by_name` maps them. `marked` tokens show their data set.

    Returns the accuracy in percent, in the numbering that was trained.
    """
    generator = torch.Generator().manual_seed(seed)
    dims, classes = task.signals_KD.shape[1], task.num_clusters
    layer = damex_layer(dims, 2, seed=seed)
    with seeded(seed):
        head = nn.Linear(dims, classes)

    def draw(size: int) -> tuple[Tensor, Tensor, Tensor]:
        class_T = torch.randint(classes, (size,), generator=generator)
        dataset_T = torch.randint(2, (size,), generator=generator)
        noise_TD = torch.randn(size, dims, generator=generator) / dims**0.5
        tokens_TD = 3.0 * task.centers_KD[class_T] + noise_TD
        if marked:
            tokens_TD = tokens_TD + 3.0 * task.signals_KD[dataset_T]
        label_T = class_T if by_name else (class_T - dataset_T) % classes
        return tokens_TD, dataset_T, label_T

    optimizer = Adam([*layer.parameters(), *head.parameters()], lr=LR)
    for _ in range(steps):
        tokens_TD, dataset_T, label_T = draw(512)
        out_T1D, record = layer(tokens_TD.unsqueeze(1), group_ids_B=dataset_T)
        loss = functional.cross_entropy(head(out_T1D.squeeze(1)), label_T)
        loss = loss + record.losses["dataset_routing"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    layer.eval()
    with torch.no_grad():
        tokens_TD, _, label_T = draw(10 * 512)
        out_T1D, _ = layer(tokens_TD.unsqueeze(1))
        right_T = head(out_T1D.squeeze(1)).argmax(dim=1) == label_T
    return 100.0 * right_T.double().mean().item()


@torch.no_grad()
def _quality(
    layer: MoELayer, tokens_BND: Tensor, datasets_B: Tensor
) -> tuple[float, float]:
    """Routing accuracy and confidence in percent, without a capacity's drops."""
    layer.eval()
    record = layer.route(tokens_BND, group_ids_B=datasets_B)
    dropless = TopKGate()(record.logits_VE)
    record = replace(record, assignment=dropless)
    hits_G, tokens_G = routing_hits(record)
    own_T = datasets_B.repeat_interleave(tokens_BND.shape[1])
    own_prob_T = record.probs_VE.gather(1, own_T.unsqueeze(1))
    share = hits_G.sum() / tokens_G.sum()
    return 100.0 * share.item(), 100.0 * own_prob_T.mean().item()


@torch.no_grad()
def _dropped(layer: MoELayer, tokens_BND: Tensor) -> float:
    """Dropped tokens in percent, one image per device."""
    layer.eval()
    shares = []
    for image_ND in tokens_BND:
        dropped, asked = dropped_counts(layer.route(image_ND.unsqueeze(0)))
        shares.append(dropped.item() / asked.item())
    return 100.0 * sum(shares) / len(shares)
