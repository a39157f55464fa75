"""Convolutions and FFNs whose channels are opened and closed per image.

Axes: B images, C channels, H and W height and width of a map, N tokens per image, D and
H widths of an FFN; O open channels of one image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


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
    still zero in `x_BCHW`. See `check_gateable` for what is supported.
    """
    if skip_closed and (gates_BC is not None or in_gates_BC is not None):
        y_BCHW = torch.cat(
            [
                _one_image(
                    x_BCHW[image : image + 1],
                    None if gates_BC is None else gates_BC[image],
                    None if in_gates_BC is None else in_gates_BC[image],
                    conv=conv,
                    norm=norm,
                )
                for image in range(x_BCHW.shape[0])
            ]
        )
    else:
        y_BCHW = conv(x_BCHW)
        if norm is not None:
            y_BCHW = norm(y_BCHW)
        if gates_BC is not None:
            y_BCHW = y_BCHW * gates_BC.to(y_BCHW.dtype)[:, :, None, None]
    return y_BCHW if activation is None else activation(y_BCHW)


def check_gateable(
    conv: nn.Module, norm: nn.Module | None, activation: nn.Module | None
) -> None:
    """Raise ValueError for layers whose closed channels cannot be skipped.

    Supported are a Conv2d with groups=1 and zero padding, a batch norm with running
    statistics, an Identity or no norm, and elementwise activations that map 0 to 0.
    """
    if (
        not isinstance(conv, nn.Conv2d)
        or conv.groups != 1
        or conv.padding_mode != "zeros"
        or isinstance(conv.padding, str)
    ):
        raise ValueError(
            "gated channels need a Conv2d with groups=1 and zero padding given in "
            f"numbers, got {conv}"
        )
    per_channel = isinstance(norm, _BatchNorm) and norm.running_mean is not None
    if norm is not None and not per_channel and not isinstance(norm, nn.Identity):
        raise ValueError(
            "gated channels need a batch norm with running statistics, as other norms "
            f"mix the channels of an image, got {norm}"
        )
    if activation is not None:
        check_activation(activation)


def check_activation(activation: nn.Module) -> None:
    """Raise ValueError if an elementwise activation does not map 0 to 0."""
    if activation(torch.zeros(1)).item() != 0.0:
        raise ValueError(
            "a closed channel must stay zero after the activation, but "
            f"{activation} of 0 is not 0"
        )


def _one_image(
    x_1CHW: Tensor,
    gates_C: Tensor | None,
    in_gates_C: Tensor | None,
    *,
    conv: nn.Conv2d,
    norm: nn.Module | None,
) -> Tensor:
    """Compute the open channels of one image from the open ones of its input."""
    open_O = None if gates_C is None else gates_C.nonzero().squeeze(1)
    weight, bias = _select(conv.weight, open_O), _select(conv.bias, open_O)
    if in_gates_C is not None:
        open_in = in_gates_C.nonzero().squeeze(1)
        weight = weight.index_select(1, open_in)
        x_1CHW = x_1CHW.index_select(1, open_in)
    y_1OHW = _conv(x_1CHW, weight, bias, like=conv)
    y_1OHW = _norm(y_1OHW, norm, open_O)
    if gates_C is None or open_O is None:
        return y_1OHW
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


def _norm(y_1OHW: Tensor, norm: nn.Module | None, open_O: Tensor | None) -> Tensor:
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


def _select(values: Any, index: Tensor | None) -> Any:
    """Select along axis 0; None stays None, and without an index all is selected."""
    return values if values is None or index is None else values.index_select(0, index)
