"""DeepMoE (Wang et al. 2019): channels that are opened and closed per image.

A gating path decides which channels an image opens, and how far; convolutions and FFNs
apply its gates. The two losses are computed in float32 or wider, as a sum over channels
overflows half precision.

Axes: B images, H and W height and width of images and maps, C channels, E entries of
the embedding, V real pixels, N tokens per image, D and H widths of an FFN; O open
channels of one image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from damex.errors import check_choice, check_sizes
from damex.moe.routers import full_precision_linear


class ShallowEmbedding(nn.Module):
    """Latent mixture weights e(x) of an image (Wang et al. 2019, DeepMoE, section 3).

    3x3 convolutions of stride 2, each with batch norm and ReLU, the mean over the
    image, and one linear layer. Its output, the logits of the auxiliary loss, is e(x)
    itself, as in the authors' code. `widths` are the channels of the convolutions; the
    paper has 4 for small images and 5 for ImageNet, at about 2% of the base network's
    compute.

    With a mask, convolutions see zeros instead of padding, and batch norm and the mean
    ignore it. So e(x) does not depend on the content or amount of padding at the bottom
    and right, in training and in evaluation (up to rounding). Convolutions compute in
    the dtype of autocast, the linear layer in float32.
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
        corner; None when all are real.
        """
        mask_BHW = image_mask_BHW
        x_BCHW = images_BCHW
        if mask_BHW is not None:
            expected = (images_BCHW.shape[0], *images_BCHW.shape[2:])
            if mask_BHW.shape != expected or mask_BHW.dtype != torch.bool:
                raise ValueError(
                    f"ShallowEmbedding: image_mask_BHW must be bool of shape {expected}"
                    f", got {mask_BHW.dtype} of shape {tuple(mask_BHW.shape)}"
                )
            x_BCHW = x_BCHW.masked_fill(~mask_BHW[:, None], 0.0)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x_BCHW = conv(x_BCHW)
            if mask_BHW is not None:
                # The output at i is centered on the input at 2i.
                mask_BHW = mask_BHW[:, ::2, ::2]
            x_BCHW = functional.relu(_norm_where(norm, x_BCHW, mask_BHW))
        wide = torch.promote_types(x_BCHW.dtype, torch.float32)
        sum_BC = x_BCHW.sum(dim=(2, 3), dtype=wide)
        if mask_BHW is None:
            mean_BC = sum_BC / (x_BCHW.shape[2] * x_BCHW.shape[3])
        else:
            mean_BC = sum_BC / mask_BHW.sum(dim=(1, 2))[:, None]
        # Released code of DeepMoE: e(x) are the class logits themselves.
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


INITS = ("uniform", "ones")


class ChannelGate(nn.Module):
    """g(x) = ReLU(W e(x)): how much of each channel an image uses (Wang et al. 2019).

    Without bias: only the image opens a channel; zero is closed. In float32 with
    autocast off, since rounding must not close a channel. `init` 'uniform' draws
    weights from [-0.5, 1), as the authors do for ImageNet; 'ones' starts all channels
    equal.
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
        # DeepMoE: g(x) = ReLU(W_g e(x)), without bias.
        return functional.relu(full_precision_linear(logits_BE, self.weight_CE, None))


@dataclass(frozen=True, eq=False)
class ChannelGates:
    """The embedding e(x) of a batch, and the gates (B, C) of each layer by its name."""

    logits_BE: Tensor
    layers: Mapping[str, Tensor]


class GatingPath(nn.Module):
    """The embedding and the gates of all layers, computed before the first layer runs.

    `channels` are the numbers of channels by layer name; `init` as in `ChannelGate`.
    """

    def __init__(
        self,
        embedding: ShallowEmbedding,
        channels: Mapping[str, int],
        *,
        init: str = "uniform",
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.names = tuple(channels)
        self.frozen = False
        self.heads = nn.ModuleDict()
        for name, count in channels.items():
            self.heads[_key(name)] = ChannelGate(embedding.embed_dims, count, init=init)

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


def gate_l1(gates: Sequence[Tensor]) -> Tensor:
    """The sparsity penalty sum_l ||g^l(x)||_1 of the gates (B, C) of each layer.

    Summed over channels and layers and averaged over the batch, so it grows with width
    and depth of the network; its weight in the paper, 1e-3, is for this reduction.
    """
    # DeepMoE: sum_l ||g^l(x)||_1, times lambda in the loss.
    return torch.stack([_wide(gates_BC).sum(dim=1) for gates_BC in gates]).sum(0).mean()


def presence_loss(logits_BE: Tensor, present_BE: Tensor) -> Tensor:
    """Cross-entropy of softmax(e(x)) with the classes present in the image, evenly.

    With one class per image it is the auxiliary loss of the paper. The softmax leaves
    the mean of e(x) free: a sigmoid per class would decrease e(x) for the many absent
    classes, and so close the gates ReLU(W e(x)), whose weights are positive on average.
    The mean is over images with a class, and zero with a graph without any.
    """
    logits_BE = _wide(logits_BE)
    present_BE = present_BE.to(logits_BE.dtype)
    count_B = present_BE.sum(dim=1)
    target_BE = present_BE / count_B.clamp(min=1.0)[:, None]
    # DeepMoE: cross-entropy of the embedding's logits, times mu in the loss.
    losses_B = functional.cross_entropy(logits_BE, target_BE, reduction="none")
    return losses_B.sum() / (count_B > 0).sum().clamp(min=1)


def active_share(gates: Sequence[Tensor]) -> Tensor:
    """Share of open channels, over all layers and images, in [0, 1]."""
    return torch.cat([gates_BC > 0 for gates_BC in gates], dim=1).float().mean()


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def gated_conv2d(
    x_BCHW: Tensor,
    gates_BC: Tensor | None,
    *,
    conv: nn.Conv2d,
    norm: nn.Module | None = None,
    activation: nn.Module | None = None,
    in_gates_BC: Tensor | None = None,
    skip_closed: bool = False,
) -> Tensor:
    """y_c = activation(g_c(x) * norm_c(conv_c(x))) (Wang et al. 2019).

    Closed channels are exactly zero; without gates all are open. `skip_closed` computes
    open channels only, image by image, which synchronizes a GPU once per image and
    needs batch norm in evaluation mode. It does not read the channels that
    `in_gates_BC` closes: the gates of the layer before, if its closed channels are
    still zero in `x_BCHW`. Supported are a Conv2d with groups=1 and zero padding, a
    batch norm with running statistics or none, and activations that map 0 to 0.
    """
    if skip_closed and (gates_BC is not None or in_gates_BC is not None):
        count = len(x_BCHW)
        if gates_BC is None:
            gates_BC = x_BCHW.new_ones(count, conv.out_channels)
        if in_gates_BC is None:
            in_gates_BC = x_BCHW.new_ones(count, conv.in_channels)
        rows = zip(x_BCHW.split(1), gates_BC, in_gates_BC, strict=True)
        y_BCHW = torch.cat([_one_image(*row, conv=conv, norm=norm) for row in rows])
    else:
        y_BCHW = conv(x_BCHW)
        if norm is not None:
            y_BCHW = norm(y_BCHW)
        if gates_BC is not None:
            # DeepMoE: y_c = g_c(x) * conv_c(x), after the norm and before the ReLU.
            y_BCHW = y_BCHW * gates_BC.to(y_BCHW.dtype)[:, :, None, None]
    return y_BCHW if activation is None else activation(y_BCHW)


def _one_image(
    x_1CHW: Tensor,
    gates_C: Tensor,
    in_gates_C: Tensor,
    *,
    conv: nn.Conv2d,
    norm: nn.Module | None,
) -> Tensor:
    """Compute the open channels of one image from the open ones of its input."""
    open_O, open_in = (one.nonzero().squeeze(1) for one in (gates_C, in_gates_C))
    weight = conv.weight.index_select(0, open_O).index_select(1, open_in)
    x_1CHW = x_1CHW.index_select(1, open_in)
    y_1OHW = _conv(x_1CHW, weight, _select(conv.bias, open_O), like=conv)
    y_1OHW = _norm(y_1OHW, norm, open_O)
    y_1OHW = y_1OHW * gates_C.index_select(0, open_O).to(y_1OHW.dtype)[:, None, None]
    y_1CHW = y_1OHW.new_zeros(1, gates_C.shape[0], *y_1OHW.shape[2:])
    return y_1CHW.index_copy(1, open_O, y_1OHW)


def _conv(
    x_1CHW: Tensor, weight: Tensor, bias: Tensor | None, *, like: nn.Conv2d
) -> Tensor:
    """Convolve selected channels; skip the computation if there are none."""
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        size = [_out_size(x_1CHW.shape[2 + axis], like, axis) for axis in (0, 1)]
        y_1OHW = x_1CHW.new_zeros(1, weight.shape[0], *size)
        return y_1OHW if bias is None else y_1OHW + bias[:, None, None]
    return functional.conv2d(
        x_1CHW, weight, bias, like.stride, like.padding, like.dilation
    )


def _out_size(size: int, conv: nn.Conv2d, axis: int) -> int:
    """Height or width of a convolution's output; see torch's Conv2d."""
    reach = conv.dilation[axis] * (conv.kernel_size[axis] - 1) + 1
    return (size + 2 * int(conv.padding[axis]) - reach) // conv.stride[axis] + 1


def _norm(y_1OHW: Tensor, norm: nn.Module | None, open_O: Tensor) -> Tensor:
    """Apply batch norm, if any, to selected channels, with running statistics."""
    if not isinstance(norm, _BatchNorm) or y_1OHW.shape[1] == 0:
        return y_1OHW
    values = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    mean, var, weight, bias = (_select(values_C, open_O) for values_C in values)
    return functional.batch_norm(y_1OHW, mean, var, weight, bias, eps=norm.eps)


def gated_ffn(
    tokens_BND: Tensor,
    gates_BH: Tensor,
    *,
    first: nn.Linear,
    activation: nn.Module,
    second: nn.Linear,
    skip_closed: bool = False,
) -> Tensor:
    """second(activation(g(x) * first(tokens))): DeepMoE's rule for the FFN of a DETR.

    All tokens of an image share the gates of the hidden channels, 0 closes a channel.
    `skip_closed` computes open channels only, image by image.
    """
    if not skip_closed:
        hidden_BNH = first(tokens_BND)
        # The same rule before the activation of an FFN.
        hidden_BNH = hidden_BNH * gates_BH.to(hidden_BNH.dtype)[:, None, :]
        return second(activation(hidden_BNH))
    outputs = []
    for tokens_ND, gates_H in zip(tokens_BND, gates_BH, strict=True):
        open_O = gates_H.nonzero().squeeze(1)
        weight, bias = _select(first.weight, open_O), _select(first.bias, open_O)
        hidden_NO = functional.linear(tokens_ND, weight, bias)
        hidden_NO = activation(hidden_NO * _select(gates_H, open_O).to(hidden_NO.dtype))
        weight = second.weight.index_select(1, open_O)
        outputs.append(functional.linear(hidden_NO, weight, second.bias))
    return torch.stack(outputs)


def _select(values: Any, index: Tensor) -> Any:
    """Select along axis 0; None stays None."""
    return None if values is None else values.index_select(0, index)
