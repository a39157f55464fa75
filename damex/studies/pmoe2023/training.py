"""Training of the two-layer networks (section 3.2), and of the router on its own.

Axes: B samples, N patches of a sample, D pixels of a patch, E experts.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from damex.moe import MoELayer, SeparateRouterLoss
from damex.studies.pmoe2023.models import PatchMoE
from damex.studies.pmoe2023.patch_data import PatchSamples

__all__ = ["BATCH_SIZE", "accuracy", "fit", "train_router"]

BATCH_SIZE = 20  # as in the paper's released code


def train_router(
    model: PatchMoE, samples: PatchSamples, *, lr: float, epochs: int
) -> None:
    """Stage 1 of separate training: minimises eq. 6, then freezes the router.

    The loss is linear in the router's weights, so that its gradient is constant: one
    step with the learning rate of all batches of an epoch together is that epoch.

    Args:
        model: Its router has one expert per class. Classes 2i and 2i + 1 are a pair.
        samples: Training samples.
        lr: Learning rate of a step with one batch.
        epochs: Passes over the samples.
    """
    classes = range(model.num_classes)
    loss = SeparateRouterLoss(pairs=[(c, c + 1) for c in classes if c % 2 == 0])
    stage = MoELayer(
        router=model.moe.router,
        gate=model.moe.gate,
        experts=model.moe.experts,
        losses=[loss],
        group_experts=[[c] for c in classes],
    )
    weight_ED = model.router_weight_ED
    # Eq. 6 sums over the patches of a sample where the loss takes their mean.
    num_patches = samples.patches_BND.shape[1]
    steps = len(samples) / BATCH_SIZE
    optimizer = torch.optim.SGD([weight_ED], lr=lr * num_patches * steps)
    for _ in range(epochs):
        record = stage.route(samples.patches_BND, group_ids_B=samples.labels_B)
        optimizer.zero_grad()
        record.losses[loss.name].backward()
        optimizer.step()
    weight_ED.requires_grad_(False)


def fit(
    model: nn.Module,
    samples: PatchSamples,
    *,
    lr: float,
    epochs: int,
    seed: int,
    batch_size: int = BATCH_SIZE,
) -> int:
    """Plain SGD on the logistic loss until an epoch makes no training error.

    Args:
        model: Patches -> logits.
        samples: Training samples.
        lr: Learning rate.
        epochs: Passes over the samples at most.
        seed: Of the order of samples.
        batch_size: Samples of a step.

    Returns:
        Epochs that were needed.
    """
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=lr)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        errors = torch.zeros((), dtype=torch.int64)
        for rows in torch.randperm(len(samples), generator=generator).split(batch_size):
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
    """Share of samples that are classified right, in percent.

    Args:
        model: Patches -> logits.
        samples: Test samples.
    """
    model.eval()
    hits = model(samples.patches_BND).argmax(1) == samples.labels_B
    model.train()
    return 100 * hits.double().mean().item()
