"""The shallow network that looks at an image before the deep one does.

Axes: B images, H and W their height and width, C channels, V valid pixels, E entries
of the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe.routers.precision import full_precision_linear


class ShallowEmbedding(nn.Module):
    """Latent mixture weights e(x) of an image (Wang et al. 2019, DeepMoE, section 3).

    3x3 convolutions of stride 2, each with batch norm and ReLU, the mean over the
    image, and one linear layer. Its output, the logits of the auxiliary loss, is e(x)
    itself, as in the authors' code.

    With a mask, padding is as if it were not there: convolutions see zeros in its
    place, as they do beyond the border, and batch norm and the mean leave it out. So
    e(x) does not change with the content or amount of padding at the bottom and right,
    in training and in evaluation (up to rounding).

    Dtype policy: convolutions in autocast's dtype, the linear layer in float32.

    Args:
        embed_dims: E, the number of targets of the auxiliary loss.
        widths: Channels of the convolutions; the paper has 4 for small images and 5 for
            ImageNet, at about 2 % of the base network's compute.
        in_channels: Channels of the image.

    Raises:
        ValueError: If a size is not positive or there is no convolution.
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
        """Embeds a batch of images.

        Args:
            images_BCHW: As the base network sees them.
            image_mask_BHW: bool, True for real pixels, a rectangle from the top left
                corner; None when all are real.

        Returns:
            logits_BE: e(x), float32.

        Raises:
            ValueError: If the mask does not fit to the images.
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
    """Normalises real pixels, with statistics of real pixels; padding becomes zero."""
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
