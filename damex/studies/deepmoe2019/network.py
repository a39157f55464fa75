"""A convolutional network whose channels the image opens: DeepMoE at digit size.

Axes: B images, H and W height and width, C channels, E entries of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe import ChannelGates, GatedConv2d, GatingPath, ShallowEmbedding
from damex.studies.deepmoe2019.digits import NUM_CLASSES

__all__ = ["DigitNet", "Stages", "build_network"]

# Widths of the convolutions, one tuple per stage; a max pooling between stages.
Stages = Sequence[Sequence[int]]


class DigitNet(nn.Module):
    """3x3 convolutions with batch norm, a mean over the image, one linear layer.

    Args:
        stages: See `Stages`.
        embedding_widths: Of the gating path, which opens and closes the channels of
            every convolution; None for the plain network.
    """

    def __init__(
        self, stages: Stages, *, embedding_widths: Sequence[int] | None
    ) -> None:
        super().__init__()
        widths = [width for stage in stages for width in stage]
        self.layers = nn.ModuleList(
            GatedConv2d(
                nn.Conv2d(before, after, 3, padding=1, bias=False),
                norm=nn.BatchNorm2d(after),
                activation=nn.ReLU(),
            )
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
        """Classifies a batch.

        Args:
            images_B1HW: Images.

        Returns:
            logits_BE: Of the classes.
            gates: What the gating path said; None for the plain network.
        """
        gates = None if self.gating is None else self.gating(images_B1HW)
        layers = {} if gates is None else gates.layers
        return self.classify(images_B1HW, layers), gates

    def classify(self, images_B1HW: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        """Classifies with given gates.

        Args:
            images_B1HW: Images.
            gates: Gates (B, C) of each convolution by its name; one that is not named
                leaves all its channels open.

        Returns:
            logits_BE: Of the classes.
        """
        x_BCHW, before_BC = images_B1HW, None
        for name, layer in self.named_layers():
            now_BC = gates.get(name)
            x_BCHW = layer(x_BCHW, now_BC, in_gates_BC=before_BC)
            if name in self.pooled and min(x_BCHW.shape[2:]) > 1:
                x_BCHW = functional.max_pool2d(x_BCHW, 2)
            before_BC = now_BC
        return self.fc(x_BCHW.mean(dim=(2, 3)))


def build_network(
    stages: Stages, *, embedding_widths: Sequence[int] | None, seed: int
) -> DigitNet:
    """Draws a network from a seed of its own.

    Args:
        stages: See `Stages`.
        embedding_widths: See `DigitNet`.
        seed: Of the weights; the caller's random state stays as it is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DigitNet(stages, embedding_widths=embedding_widths)
