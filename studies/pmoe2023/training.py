"""What is trained, how, and what comes of it.

Two-layer networks (section 3.2), routers on their own, and wide residual networks.

Axes: B samples, N patches of a sample, D pixels of a patch, T = B*N, E experts,
G classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe import MoELayer, SeparateRouterLoss
from damex.papers.expert_choice import ExpertChoiceGate
from studies.digits import DigitSource
from studies.harness import seeded
from studies.pmoe2023.data import PatchSamples, Task
from studies.pmoe2023.models import PatchCNN, PatchMoE, Recipe, WideResNet, as_images

TOP = (1, 2, 4, 6)  # of how many patches figure 8 asks whether the right one is there
WIDE_LR = 0.1  # as in the paper
BATCH_SIZE = 20  # as in the paper's released code


@dataclass(frozen=True)
class Filters:
    """A CNN with `num_filters` hidden nodes."""

    num_filters: int
    filter_std: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training; equal jobs of two experiments are run once.

    Attributes:
        network: What is trained.
        num_samples: Training samples.
        epochs: At most; fewer when an epoch makes no training error.
        lr: Learning rate.
        task: The classification task.
        test_samples: Number of test samples.
        router_epochs: Of a router that is trained on its own.
    """

    network: Recipe | Filters
    num_samples: int
    epochs: int
    lr: float = 0.2
    task: Task = field(default_factory=Task)
    test_samples: int = 1000
    router_epochs: int = 100


@dataclass(frozen=True)
class Outcome:
    """What came of a job with one seed.

    Attributes:
        accuracy: On test samples, in percent.
        train_accuracy: On the training samples at the end, in percent.
        epochs: That were needed.
        top: Of pMoE with an expert per class: percentage of test samples whose
            discriminative patch is among the first l of the class's own expert, by l.
        largest: Of other pMoE: percentage of each class's test samples whose
            discriminative patch has the largest gating value of one expert, the same
            for the whole class.
        taken: Of these: the same for patches that the expert takes at all.
    """

    accuracy: float
    train_accuracy: float
    epochs: int
    top: Mapping[int, float] = field(default_factory=dict)
    largest: tuple[float, ...] = ()
    taken: tuple[float, ...] = ()


def run_job(job: Job, source: DigitSource, seed: int) -> Outcome:
    """Train and test a two-layer network."""
    train = job.task.train(source, job.num_samples, seed)
    test = job.task.test(source, job.test_samples, seed)
    with seeded(seed):
        model = _build(job, train.patches_BND.shape[2])
    if isinstance(model, PatchMoE) and not model.recipe.joint:
        train_router(model, train, lr=job.lr, epochs=job.router_epochs)
    epochs = fit(model, train, lr=job.lr, epochs=job.epochs, seed=seed)
    outcome = Outcome(accuracy(model, test), accuracy(model, train), epochs)
    if not isinstance(model, PatchMoE):
        return outcome
    if model.recipe.joint:
        largest, taken = (
            best_hits(model, test, num) for num in (1, model.recipe.num_tokens)
        )
        return replace(outcome, largest=largest, taken=taken)
    return replace(outcome, top={count: top_hits(model, test, count) for count in TOP})


def _build(job: Job, embed_dims: int) -> nn.Module:
    num_classes = len(job.task.classes)
    if isinstance(job.network, Recipe):
        return PatchMoE(job.network, embed_dims=embed_dims, num_classes=num_classes)
    return PatchCNN(
        job.network.num_filters,
        embed_dims=embed_dims,
        num_classes=num_classes,
        filter_std=job.network.filter_std,
    )


def train_router(
    model: PatchMoE, samples: PatchSamples, *, lr: float, epochs: int
) -> None:
    """Stage 1 of separate training: minimises eq. 6, then freezes the router.

    The router has one expert per class; classes 2i and 2i + 1 are a pair. The loss is
    linear in its weights, so that its gradient is constant: one step with the learning
    rate of all batches of an epoch together is that epoch.
    """
    firsts = range(0, model.num_classes, 2)
    stages = [
        MoELayer(
            router=model.moe.router,
            gate=model.moe.gate,
            experts=model.moe.experts,
            losses=[SeparateRouterLoss()],
            group_experts=[[first], [first + 1]],
        )
        for first in firsts
    ]
    weight_ED, labels_B = model.router_weight_ED, samples.labels_B
    # Eq. 6 sums over the patches of a sample where the loss takes their mean.
    num_patches = samples.patches_BND.shape[1]
    steps = len(samples) / BATCH_SIZE
    optimizer = torch.optim.SGD([weight_ED], lr=lr * num_patches * steps)
    for _ in range(epochs):
        losses: list[Tensor] = []
        for first, stage in zip(firsts, stages, strict=True):
            # 0 or 1 in the pair; -1 elsewhere, which does not count
            class_B = torch.where(labels_B // 2 == first // 2, labels_B - first, -1)
            record = stage.route(samples.patches_BND, group_ids_B=class_B)
            losses += record.losses.values()
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    weight_ED.requires_grad_(False)


def fit(
    model: nn.Module, samples: PatchSamples, *, lr: float, epochs: int, seed: int
) -> int:
    """SGD on the logistic loss until an epoch has no error; returns the epochs."""
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=lr)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        errors = torch.zeros((), dtype=torch.int64)
        for rows in torch.randperm(len(samples), generator=generator).split(BATCH_SIZE):
            logits = model(samples.patches_BND[rows])
            labels = samples.labels_B[rows]
            optimizer.zero_grad()
            functional.cross_entropy(logits, labels).backward()
            optimizer.step()
            errors += (logits.argmax(1) != labels).sum()
        if errors == 0:
            return epoch + 1
    return epochs


@torch.no_grad()
def accuracy(model: nn.Module, samples: PatchSamples) -> float:
    """Share of samples that are classified right, in percent."""
    model.eval()
    hits = model(samples.patches_BND).argmax(1) == samples.labels_B
    model.train()
    return 100 * hits.double().mean().item()


def top_hits(model: PatchMoE, samples: PatchSamples, num_tokens: int) -> float:
    """Figure 8: percentage of samples whose class's expert would take the patch."""
    taken_BE = _discriminative_taken(model, samples, num_tokens)
    own_B = taken_BE.gather(1, samples.labels_B.unsqueeze(1))
    return 100 * own_B.double().mean().item()


def best_hits(
    model: PatchMoE, samples: PatchSamples, num_tokens: int
) -> tuple[float, ...]:
    """By class, percentage of samples whose patch its best expert would take.

    With one patch per expert: the patch has the largest gating value (figure 9).
    """
    taken_BE = _discriminative_taken(model, samples, num_tokens)
    return tuple(
        100 * taken_BE[samples.labels_B == label].double().mean(0).max().item()
        for label in samples.labels_B.unique().tolist()
    )


@torch.no_grad()
def _discriminative_taken(
    model: PatchMoE, samples: PatchSamples, num_tokens: int
) -> Tensor:
    """Whether each expert has the discriminative patch among its first few."""
    _, record = model.forward_with_record(samples.patches_BND)
    num_samples, num_patches, _ = samples.patches_BND.shape
    gate = ExpertChoiceGate(num_tokens=num_tokens)
    assignment = gate(record.logits_VE, record.packing)
    taken_TE = torch.zeros_like(record.logits_VE, dtype=torch.bool)
    taken_TE[assignment.token_index_R, assignment.expert_index_R] = True
    patch_B = torch.arange(num_samples) * num_patches + samples.position_B
    return taken_TE[patch_B]


def run_wide(
    experts: bool,
    count: int,
    source: DigitSource,
    seed: int,
    *,
    epochs: int,
    test_samples: int,
) -> float:
    """Test accuracy, in percent, of WRN-pMoE, or of WRN without experts."""
    train = as_images(Task().train(source, count, seed))
    side = train.patches_BND.shape[-1]
    with seeded(seed):
        model = WideResNet(side=side, num_classes=2, experts=experts)
    fit(model, train, lr=WIDE_LR, epochs=epochs, seed=seed)
    return accuracy(model, as_images(Task().test(source, test_samples, seed)))
