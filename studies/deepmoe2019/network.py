"""DeepMoE at digit size: a network whose channels the image opens, and its training.

Axes: B images, H and W height and width, C channels, E entries of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from damex.papers.channels import (
    ChannelGates,
    GatingPath,
    ShallowEmbedding,
    gate_l1,
    gated_conv2d,
)
from studies.digits import DigitImages, DigitSource, uci_digits

NUM_CLASSES = 10
NUM_TRAIN = 1200  # of 1797; the other 597 are the test images
# Widths of the convolutions, one tuple per stage; a max pooling between stages.
Stages = Sequence[Sequence[int]]


class GatedConv2d(nn.Module):
    """Convolution, batch norm, times the gate, ReLU: a DeepMoE layer.

    In training all channels are computed and multiplied by their gates. In evaluation
    closed channels are not computed at all, image by image; the result is the same.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)
        self.activation = nn.ReLU()
        self.skip_closed = True

    def forward(
        self,
        x_BCHW: Tensor,
        gates_BC: Tensor | None,
        *,
        in_gates_BC: Tensor | None = None,
    ) -> Tensor:
        """See `damex.papers.channels.gated_conv2d`."""
        return gated_conv2d(
            x_BCHW,
            gates_BC,
            conv=self.conv,
            norm=self.norm,
            activation=self.activation,
            in_gates_BC=in_gates_BC,
            skip_closed=self.skip_closed and not self.training,
        )


class DigitNet(nn.Module):
    """3x3 convolutions with batch norm, a mean over the image, one linear layer.

    Args:
        stages: Widths of the convolutions in each stage.
        embedding_widths: Of the gating path, which opens and closes the channels of
            every convolution; None for the plain network.
    """

    def __init__(
        self, stages: Stages, *, embedding_widths: Sequence[int] | None
    ) -> None:
        super().__init__()
        widths = [width for stage in stages for width in stage]
        self.layers = nn.ModuleList(
            GatedConv2d(before, after)
            for before, after in zip([1, *widths], widths, strict=False)
        )
        self.names = tuple(f"conv{number}" for number in range(1, len(widths) + 1))
        ends = {sum(map(len, stages[: end + 1])) for end in range(len(stages) - 1)}
        self.pooled = frozenset(self.names[end - 1] for end in ends)
        self.fc = nn.Linear(widths[-1], NUM_CLASSES)
        self.gating: GatingPath | None = None
        if embedding_widths is not None:
            embedding = ShallowEmbedding(
                NUM_CLASSES, widths=embedding_widths, in_channels=1
            )
            channels = dict(zip(self.names, widths, strict=True))
            self.gating = GatingPath(embedding, channels)

    def named_layers(self) -> Iterator[tuple[str, GatedConv2d]]:
        """The convolutions with their names, in order."""
        for name, layer in zip(self.names, self.layers, strict=True):
            if isinstance(layer, GatedConv2d):
                yield name, layer

    def forward(self, images_B1HW: Tensor) -> tuple[Tensor, ChannelGates | None]:
        """Classify a batch; the gates are None for the plain network."""
        gates = None if self.gating is None else self.gating(images_B1HW)
        layers = {} if gates is None else gates.layers
        return self.classify(images_B1HW, layers), gates

    def classify(self, images_B1HW: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        """Classify with gates (B, C) by convolution; one that is not named is open."""
        x_BCHW, before_BC = images_B1HW, None
        for name, layer in self.named_layers():
            now_BC = gates.get(name)
            x_BCHW = layer(x_BCHW, now_BC, in_gates_BC=before_BC)
            if name in self.pooled and min(x_BCHW.shape[2:]) > 1:
                x_BCHW = functional.max_pool2d(x_BCHW, 2)
            before_BC = now_BC
        return self.fc(x_BCHW.mean(dim=(2, 3)))


def draw_digits(*, seed: int, num_train: int = NUM_TRAIN) -> DigitSource:
    """Divide UCI's digits at random; `num_train` does not change the test images."""
    digits = uci_digits(NUM_TRAIN, seed=seed)
    return replace(digits, train=digits.train[:num_train])


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


def train(
    network: DigitNet,
    digits: DigitSource,
    recipe: Recipe,
    generator: torch.Generator,
    *,
    stage: int,
) -> None:
    """One of the two stages; the network is left in evaluation.

    1: L = CE(x, y) + lambda sum_l ||g^l(x)||_1 + mu CE(e(x), y). 2: the gating path is
    frozen and both weights are zero. An incomplete batch is left out.
    """
    if stage == 2 and network.gating is not None:
        network.gating.freeze()
    optimizer = SGD(
        [p for p in network.parameters() if p.requires_grad],
        lr=recipe.lr if stage == 1 else recipe.lr / 10,
        momentum=0.9,
        weight_decay=recipe.weight_decay,
    )
    network.train()
    for _ in range(recipe.joint_epochs if stage == 1 else recipe.frozen_epochs):
        order_S = torch.randperm(len(digits.train), generator=generator)
        for index_B in order_S.split(recipe.batch_size):
            if len(index_B) < recipe.batch_size:
                continue
            loss = _loss(network, digits.train[index_B], recipe, stage=stage)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()


def _loss(
    network: DigitNet, batch: DigitImages, recipe: Recipe, *, stage: int
) -> Tensor:
    logits_BE, gates = network(batch.images_S1HW)
    loss = functional.cross_entropy(logits_BE, batch.labels_S)
    if gates is None or stage == 2:
        return loss
    sparsity = gate_l1(list(gates.layers.values()))
    auxiliary = functional.cross_entropy(gates.logits_BE, batch.labels_S)
    return loss + recipe.l1_weight * sparsity + recipe.aux_weight * auxiliary


VGG: Stages = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)
# Two widths are lost in the text of the table. The last of W1-High is the one that
# gives it as many weights as W1-Mid and W13-All have (24.2 million both); W4-Low widens
# four layers and shows 512 for the first two of them.
STRATEGIES: Mapping[str, Stages] = {
    "W1-High": ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512, 512, 2565)),
    "W1-Mid": ((64, 64), (128, 128), (2990, 256, 256), (512,) * 3, (512,) * 3),
    "W4-Low": ((512, 512), (512, 512), (256,) * 3, (512,) * 3, (512,) * 3),
    "W13-All": ((128, 128), (256, 256), (405,) * 3, (615,) * 3, (615,) * 3),
}


def conv_parameters(stages: Stages, *, in_channels: int = 3) -> int:
    """Count the weights of 3x3 convolutions, without biases."""
    widths = [in_channels, *(width for stage in stages for width in stage)]
    return sum(9 * before * after for before, after in pairwise(widths))


def shrink(stages: Stages, divisor: int) -> Stages:
    """Divide all widths."""
    shrunk: list[Sequence[int]] = [
        tuple(max(round(width / divisor), 1) for width in stage) for stage in stages
    ]
    return tuple(shrunk)
