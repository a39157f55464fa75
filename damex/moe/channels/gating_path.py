"""The gating path of DeepMoE: one embedding of the image, one gate per layer.

Axes: B images, H and W their height and width, E entries of the embedding, C channels
of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from damex.moe.channels.gate import ChannelGate
from damex.moe.channels.shallow_embedding import ShallowEmbedding


@dataclass(frozen=True, eq=False)
class ChannelGates:
    """What the gating path says about a batch.

    Attributes:
        logits_BE: The embedding e(x), on which the auxiliary loss acts.
        layers: Gates (B, C) of each layer by its name; 0 closes a channel.
    """

    logits_BE: Tensor
    layers: Mapping[str, Tensor]


class GatingPath(nn.Module):
    """Everything that decides about channels, apart from the network that has them.

    It looks at the image once and answers for all layers, before the first of them
    runs.

    Args:
        embedding: Image -> e(x); see `ShallowEmbedding` for what it must offer.
        channels: Number of channels of each gated layer by its name.
        init: See `ChannelGate`.

    Raises:
        ValueError: If there is no layer.
    """

    def __init__(
        self,
        embedding: ShallowEmbedding,
        channels: Mapping[str, int],
        *,
        init: str = "uniform",
    ) -> None:
        super().__init__()
        if not channels:
            raise ValueError("GatingPath: needs one or more layers to gate, got none")
        self.embedding = embedding
        self.names = tuple(channels)
        self.frozen = False
        self.heads = nn.ModuleDict(
            {
                _key(name): ChannelGate(embedding.embed_dims, count, init=init)
                for name, count in channels.items()
            }
        )

    def forward(
        self, images_BCHW: Tensor, image_mask_BHW: Tensor | None = None
    ) -> ChannelGates:
        """Gates of a batch of images; see `ShallowEmbedding` for the arguments."""
        logits_BE = self.embedding(images_BCHW, image_mask_BHW)
        layers = {name: self.heads[_key(name)](logits_BE) for name in self.names}
        return ChannelGates(logits_BE=logits_BE, layers=layers)

    def freeze(self) -> None:
        """Ends stage 1 of the training: nothing in here changes from now on.

        Stage 2 fine-tunes the base network alone, with both loss weights at zero. The
        statistics of batch norms stay as they are, too, also after `train()`.
        """
        self.frozen = True
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> GatingPath:
        """Sets the training mode; a frozen path stays in evaluation."""
        return super().train(mode and not self.frozen)


def _key(name: str) -> str:
    """Torch does not allow dots in the names of modules."""
    return name.replace(".", "_")
