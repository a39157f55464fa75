"""Training of mixtures (Algorithm 1) and of single models.

Axes: K clusters, E experts, B samples, C outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from damex.moe import (
    MoELayer,
    NormalizedGD,
    RoutingRecord,
    TopKGate,
    dispatch_counts,
    dispatch_entropy,
    expert_parameters,
)
from damex.studies.chen2022.data import NUM_CLUSTERS, PATCH_DIMS
from damex.studies.chen2022.experts import PatchwiseExperts
from damex.studies.chen2022.recipes import (
    Recipe,
    build_mixture,
    class_margin,
    mixture_loss,
)
from damex.studies.cluster_data import ClusterSamples

__all__ = [
    "CURVE_STRIDE",
    "Outcome",
    "accuracy",
    "train_mixture",
    "train_single",
]

CURVE_STRIDE = 10
EXPERT_LR, ROUTER_LR = 0.001, 0.1
ENOUGH, WORSE = 0.314, 0.02  # when the code stops early
SINGLE_LR = 0.01
SINGLE_LINEAR_LR = 0.003
SINGLE_WEIGHT_DECAY = 5e-4
SINGLE_INPUT_SCALE = 10.0
CHUNK = 1000  # samples whose hidden values fit into a cache


@dataclass(frozen=True, eq=False)
class Outcome:
    """A trained mixture.

    Attributes:
        accuracy: On test data, per cent.
        entropy: Dispatch entropy in nats: as released on training data with noise, in
            the paper's form on test data without.
        noisy_entropy: In the last step of training.
        curve: Dispatch entropy of training data every `CURVE_STRIDE` steps, with noise
            as released and without in the paper's form.
        first_KE: Dispatch of training data in the first step, with noise.
        last_KE: Dispatch that `entropy` is taken of.
        steps: Steps until the end, early or not.
    """

    accuracy: float
    entropy: float
    noisy_entropy: float
    curve: Sequence[float]
    first_KE: Tensor
    last_KE: Tensor
    steps: int


@dataclass(frozen=True, eq=False)
class _Descent:
    first_KE: Tensor
    last_KE: Tensor
    curve: Sequence[float]
    steps: int


def train_mixture(
    recipe: Recipe,
    task: tuple[ClusterSamples, ClusterSamples],
    *,
    activation: str,
    seed: int,
    balance: bool = False,
) -> Outcome:
    """Algorithm 1: normalised descent for experts, plain descent for the router.

    Args:
        recipe: The form.
        task: Training and test data.
        activation: Of the experts.
        seed: Of initial values and noise.
        balance: Whether to add the load balance loss.
    """
    train, test = task
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = build_mixture(recipe, activation, balance=balance)
        descent = _descend(recipe, layer, train)
        layer.train(recipe.as_released)  # the code never leaves training mode
        with torch.no_grad():
            out_BC, record = _forward(layer, _tokens(recipe, test), test.clusters_B)
    last_KE = descent.last_KE if recipe.as_released else _counts(record)
    return Outcome(
        accuracy=accuracy(class_margin(out_BC), test.labels_B),
        entropy=dispatch_entropy(last_KE).item(),
        noisy_entropy=dispatch_entropy(descent.last_KE).item(),
        curve=descent.curve,
        first_KE=descent.first_KE,
        last_KE=last_KE,
        steps=descent.steps,
    )


def train_single(
    task: tuple[ClusterSamples, ClusterSamples],
    *,
    activation: str,
    num_filters: int,
    steps: int,
    seed: int,
) -> float:
    """A single model as the code has it: Adam, two logits with biases, inputs x10.

    Args:
        task: Training and test data.
        activation: Of the filters.
        num_filters: Of both classes together.
        steps: Full-batch steps.
        seed: Of initial values.

    Returns:
        Accuracy on test data, per cent.
    """
    train, test = task
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PatchwiseExperts(
            1,
            PATCH_DIMS,
            num_filters,
            num_outputs=2,
            activation=activation,
            bias=True,
            init="uniform",
            init_scale=1.0,
        )
    linear = activation == "identity"
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=SINGLE_LINEAR_LR if linear else SINGLE_LR,
        weight_decay=SINGLE_WEIGHT_DECAY,
    )
    rows_BX = train.patches_BPD.flatten(1) * SINGLE_INPUT_SCALE
    classes_B = (train.labels_B > 0).long()
    for _ in range(steps):
        optimizer.zero_grad()
        for rows, classes in zip(
            rows_BX.split(CHUNK), classes_B.split(CHUNK), strict=True
        ):
            out = model(rows, torch.tensor([len(rows)]))
            loss = functional.cross_entropy(out, classes, reduction="sum")
            (loss / len(rows_BX)).backward()
        optimizer.step()
    with torch.no_grad():
        chunks = (test.patches_BPD.flatten(1) * SINGLE_INPUT_SCALE).split(CHUNK)
        outs = [model(rows, torch.tensor([len(rows)])) for rows in chunks]
    return accuracy(class_margin(torch.cat(outs)), test.labels_B)


def accuracy(margin_B: Tensor, labels_B: Tensor) -> float:
    """Share of margins with the sign of the label, per cent."""
    return 100.0 * (margin_B * labels_B > 0).double().mean().item()


def _descend(recipe: Recipe, layer: MoELayer, train: ClusterSamples) -> _Descent:
    groups, others = expert_parameters(layer)
    optimizers = (
        NormalizedGD(
            groups,
            lr=EXPERT_LR,
            norm="sum" if recipe.as_released else "frobenius",
        ),
        torch.optim.SGD(others, lr=ROUTER_LR),
    )
    tokens_B1X = _tokens(recipe, train)
    counts: list[Tensor] = []
    curve: list[float] = []
    best = float("inf")
    for step in range(recipe.steps):
        out_BC, record = _forward(layer, tokens_B1X, train.clusters_B)
        loss = mixture_loss(recipe, out_BC, train.labels_B)
        loss = torch.stack([loss, *record.losses.values()]).sum()
        counts.append(_counts(record))
        if step % CURVE_STRIDE == 0:
            shown = counts[-1] if recipe.as_released else _clean_counts(record)
            curve.append(dispatch_entropy(shown).item())
        if loss.item() <= best:
            best = loss.item()
        elif recipe.as_released and not ENOUGH < loss.item() <= best + WORSE:
            break
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return _Descent(counts[0], counts[-1], curve, len(counts))


def _tokens(recipe: Recipe, data: ClusterSamples) -> Tensor:
    """A sample is an image of one token, all its patches side by side."""
    return data.patches_BPD.flatten(1).unsqueeze(1) * recipe.input_scale


def _forward(
    layer: MoELayer, tokens_B1X: Tensor, clusters_B: Tensor
) -> tuple[Tensor, RoutingRecord]:
    """Outputs and routes; the clusters are there to be counted only."""
    out_B1C, record = layer(tokens_B1X, group_ids_B=clusters_B)
    return out_B1C.squeeze(1), record


def _clean_counts(record: RoutingRecord) -> Tensor:
    """What the dispatch would be without noise."""
    assignment = TopKGate(1)(record.logits_TE.unsqueeze(0))
    return _counts(replace(record, assignment=assignment))


def _counts(record: RoutingRecord) -> Tensor:
    return dispatch_counts(record, num_groups=NUM_CLUSTERS)
