"""The gating path of DeepMoE: which channels an image opens, and how far.

Axes: B images, H and W their height and width, C channels, E entries of the embedding,
V real pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.errors import check_choice, check_sizes
from damex.moe.routers import full_precision_linear


class ShallowEmbedding(nn.Module):
    """Latent mixture weights e(x) of an image (Wang et al. 2019, DeepMoE, section 3).

    3x3 convolutions of stride 2, each with batch norm and ReLU, the mean over the
    image, and one linear layer. Its output, the logits of the auxiliary loss, is e(x)
    itself, as in the authors' code.

    With a mask, convolutions see zeros instead of padding, and batch norm and the mean
    ignore it. So e(x) does not depend on the content or amount of padding at the bottom
    and right, in training and in evaluation (up to rounding). Convolutions compute in
    the dtype of autocast, the linear layer in float32.

    Args:
        embed_dims: E, the number of targets of the auxiliary loss.
        widths: Channels of the convolutions; the paper has 4 for small images and 5 for
            ImageNet, at about 2 % of the base network's compute.
        in_channels: Channels of the image.

    Raises:
        ValueError: If a size is not positive or `widths` is empty.
    """

    def __init__(
        self,
        embed_dims: int,
        *,
        widths: Sequence[int] = (16, 32, 64, 128),
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        sizes = [in_channels, *widths]
        if len(widths) == 0 or min(embed_dims, *sizes) < 1:
            raise ValueError(
                "ShallowEmbedding: needs positive embed_dims, in_channels and one or "
                f"more positive widths, got {embed_dims}, {in_channels} and "
                f"{list(widths)}"
            )
        self.embed_dims = embed_dims
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
            for before, after in pairwise(sizes)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.fc = nn.Linear(sizes[-1], embed_dims)

    def forward(
        self, images_BCHW: Tensor, image_mask_BHW: Tensor | None = None
    ) -> Tensor:
        """Return e(x) of a batch of images, float32.

        `image_mask_BHW` is bool, True for real pixels, a rectangle from the top left
        corner; None when all are real. Raises ValueError if it does not match the
        images.
        """
        mask_BHW = image_mask_BHW
        x_BCHW = images_BCHW
        if mask_BHW is not None:
            _check_mask(images_BCHW, mask_BHW)
            x_BCHW = x_BCHW.masked_fill(~mask_BHW[:, None], 0.0)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x_BCHW = conv(x_BCHW)
            if mask_BHW is not None:
                # The output at i is centred on the input at 2i.
                mask_BHW = mask_BHW[:, ::2, ::2]
            x_BCHW = functional.relu(_norm_where(norm, x_BCHW, mask_BHW))
        wide = torch.promote_types(x_BCHW.dtype, torch.float32)
        sum_BC = x_BCHW.sum(dim=(2, 3), dtype=wide)
        if mask_BHW is None:
            mean_BC = sum_BC / (x_BCHW.shape[2] * x_BCHW.shape[3])
        else:
            mean_BC = sum_BC / mask_BHW.sum(dim=(1, 2))[:, None]
        return full_precision_linear(mean_BC, self.fc.weight, self.fc.bias)


def _norm_where(norm: nn.Module, x_BCHW: Tensor, mask_BHW: Tensor | None) -> Tensor:
    """Normalize by statistics of real pixels; padding becomes zero."""
    if mask_BHW is None:
        return norm(x_BCHW)
    if not norm.training:
        return norm(x_BCHW).masked_fill(~mask_BHW[:, None], 0.0)
    x_VC = x_BCHW.movedim(1, -1)[mask_BHW]
    normed_VC = norm(x_VC.t()[None, :, :, None])[0, :, :, 0].t()
    out_BHWC = normed_VC.new_zeros(*mask_BHW.shape, x_BCHW.shape[1])
    return out_BHWC.index_put((mask_BHW,), normed_VC).movedim(-1, 1)


def _check_mask(images_BCHW: Tensor, mask_BHW: Tensor) -> None:
    expected = (images_BCHW.shape[0], *images_BCHW.shape[2:])
    if mask_BHW.shape != expected or mask_BHW.dtype != torch.bool:
        raise ValueError(
            f"ShallowEmbedding: image_mask_BHW must be bool of shape {expected}, got "
            f"{mask_BHW.dtype} of shape {tuple(mask_BHW.shape)}"
        )


INITS = ("uniform", "ones")


class ChannelGate(nn.Module):
    """g(x) = ReLU(W e(x)): how much of each channel an image uses (Wang et al. 2019).

    Without bias: only the image opens a channel; zero is closed. Computes in float32
    with autocast off, since rounding must not close a channel.

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
        check_choice("ChannelGate", INITS, init=init)
        self.num_channels = num_channels
        self.init = init
        self.weight_CE = nn.Parameter(torch.empty(num_channels, embed_dims))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the weights."""
        if self.init == "ones":
            nn.init.ones_(self.weight_CE)
        else:
            nn.init.uniform_(self.weight_CE, -0.5, 1.0)

    def forward(self, logits_BE: Tensor) -> Tensor:
        """Return the gates (B, C) of a batch, float32; 0 closes a channel."""
        return functional.relu(full_precision_linear(logits_BE, self.weight_CE, None))


@dataclass(frozen=True, eq=False)
class ChannelGates:
    """The gates of a batch.

    Attributes:
        logits_BE: The embedding e(x), input of the auxiliary loss.
        layers: Gates (B, C) of each layer by its name; 0 closes a channel.
    """

    logits_BE: Tensor
    layers: Mapping[str, Tensor]


class GatingPath(nn.Module):
    """The embedding and the gates of all layers, computed before the first layer runs.

    Args:
        embedding: Image -> e(x).
        channels: Number of channels of each gated layer by its name.
        init: See `ChannelGate`.

    Raises:
        ValueError: If `channels` is empty.
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
        """Return the gates of a batch of images; arguments as in `ShallowEmbedding`."""
        logits_BE = self.embedding(images_BCHW, image_mask_BHW)
        layers = {name: self.heads[_key(name)](logits_BE) for name in self.names}
        return ChannelGates(logits_BE=logits_BE, layers=layers)

    def freeze(self) -> None:
        """Start stage 2: freeze this module, including its batch norm statistics.

        Stage 2 fine-tunes the base network only, with both loss weights at zero.
        """
        self.frozen = True
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> GatingPath:
        """Set the training mode; a frozen path stays in evaluation mode."""
        return super().train(mode and not self.frozen)


def _key(name: str) -> str:
    """Return a module name without dots, which torch does not allow."""
    return name.replace(".", "_")
