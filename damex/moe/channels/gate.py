"""The gate of one layer's channels.

Axes: B images, E entries of the embedding, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe.routers.precision import check_sizes, full_precision_linear

INITS = ("uniform", "ones")


class ChannelGate(nn.Module):
    """g(x) = ReLU(W e(x)): how much of each channel an image uses (Wang et al. 2019).

    There is no bias: an image is all that opens a channel. What is zero is closed.

    Dtype policy: float32 with autocast off, since rounding must not close a channel.

    Args:
        embed_dims: E.
        num_channels: C.
        init: 'uniform' draws weights from [-0.5, 1), as the authors do for ImageNet;
            'ones' starts all channels equal.

    Raises:
        ValueError: If a size is not positive or `init` is unknown.
    """

    def __init__(
        self, embed_dims: int, num_channels: int, *, init: str = "uniform"
    ) -> None:
        super().__init__()
        check_sizes("ChannelGate", embed_dims=embed_dims, num_channels=num_channels)
        if init not in INITS:
            raise ValueError(
                f"ChannelGate: init must be one of {list(INITS)}, got {init!r}"
            )
        self.num_channels = num_channels
        self.init = init
        self.weight_CE = nn.Parameter(torch.empty(num_channels, embed_dims))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew."""
        if self.init == "ones":
            nn.init.ones_(self.weight_CE)
        else:
            nn.init.uniform_(self.weight_CE, -0.5, 1.0)

    def forward(self, logits_BE: Tensor) -> Tensor:
        """Gates of a batch.

        Args:
            logits_BE: The embedding e(x).

        Returns:
            gates_BC: float32, 0 or more; 0 closes a channel.
        """
        return functional.relu(full_precision_linear(logits_BE, self.weight_CE, None))

    def extra_repr(self) -> str:
        """Sizes and options, for `print(module)`."""
        channels, entries = self.weight_CE.shape
        return f"embed_dims={entries}, num_channels={channels}, init={self.init!r}"
