"""DeepMoE's training: everything jointly at first, then the network with fixed gates.

Axes: B images, H and W height and width, E entries of the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import SGD

from damex.moe import gate_l1
from damex.studies.deepmoe2019.digits import Digits
from damex.studies.deepmoe2019.network import DigitNet

__all__ = ["Recipe", "train_joint", "train_with_fixed_gates"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is trained; a plain one in the same epochs without the gates.

    Attributes:
        l1_weight: lambda, of the gates' sum over channels and layers.
        aux_weight: mu, of the embedding's cross-entropy.
        joint_epochs: Stage 1.
        frozen_epochs: Stage 2, at a tenth of the learning rate.
        batch_size: Images.
        lr: Of SGD with momentum 0.9.
        weight_decay: Of SGD.
    """

    l1_weight: float = 1e-3
    aux_weight: float = 1.0
    joint_epochs: int = 30
    frozen_epochs: int = 10
    batch_size: int = 64
    lr: float = 0.05
    weight_decay: float = 5e-4


def train_joint(
    network: DigitNet, digits: Digits, recipe: Recipe, generator: torch.Generator
) -> None:
    """Stage 1: L = CE(x, y) + lambda sum_l ||g^l(x)||_1 + mu CE(e(x), y).

    Args:
        network: Trained in place, left in evaluation.
        digits: The data.
        recipe: How.
        generator: Of the order.
    """
    _train(network, digits, recipe, generator, stage=1)


def train_with_fixed_gates(
    network: DigitNet, digits: Digits, recipe: Recipe, generator: torch.Generator
) -> None:
    """Stage 2: the gating path is frozen, both weights are zero.

    Args:
        network: See `train_joint`, like the rest.
        digits: See there.
        recipe: See there.
        generator: See there.
    """
    if network.gating is not None:
        network.gating.freeze()
    _train(network, digits, recipe, generator, stage=2)


def _train(
    network: DigitNet,
    digits: Digits,
    recipe: Recipe,
    generator: torch.Generator,
    *,
    stage: int,
) -> None:
    optimizer = SGD(
        [p for p in network.parameters() if p.requires_grad],
        lr=recipe.lr if stage == 1 else recipe.lr / 10,
        momentum=0.9,
        weight_decay=recipe.weight_decay,
    )
    network.train()
    epochs = recipe.joint_epochs if stage == 1 else recipe.frozen_epochs
    for _ in range(epochs):
        for images_B1HW, labels_B in digits.batches(recipe.batch_size, generator):
            loss = _loss(network, images_B1HW, labels_B, recipe, stage=stage)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()


def _loss(
    network: DigitNet,
    images_B1HW: Tensor,
    labels_B: Tensor,
    recipe: Recipe,
    *,
    stage: int,
) -> Tensor:
    logits_BE, gates = network(images_B1HW)
    loss = functional.cross_entropy(logits_BE, labels_B)
    if gates is None or stage == 2:
        return loss
    sparsity = gate_l1(list(gates.layers.values()))
    auxiliary = functional.cross_entropy(gates.logits_BE, labels_B)
    return loss + recipe.l1_weight * sparsity + recipe.aux_weight * auxiliary
