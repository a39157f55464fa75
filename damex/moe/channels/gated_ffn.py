"""A feed-forward network whose hidden channels an image opens and closes.

Axes: B images, N tokens per image, D model width, H hidden width; O open hidden
channels of one image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe.channels.activation import check_activation


class GatedFFN(nn.Module):
    """Linear, times the gate, activation, linear, with the gates of the image.

    DeepMoE's rule for convolutions put to the hidden channels of a DETR's FFN: all
    tokens of an image share its gates. In training all channels are computed; in
    evaluation closed ones are not, image by image, and the result is the same. There
    is no identity path in here.

    Args:
        embed_dims: D.
        hidden_dims: H.
        activation: A function of each value that keeps zero at zero; ReLU by default.
        dropout: Probability, behind both linear layers.
        skip_closed: Whether evaluation skips closed channels.

    Raises:
        ValueError: If a size is not positive or the activation moves zero.
    """

    def __init__(
        self,
        embed_dims: int,
        hidden_dims: int,
        *,
        activation: nn.Module | None = None,
        dropout: float = 0.0,
        skip_closed: bool = True,
    ) -> None:
        super().__init__()
        if min(embed_dims, hidden_dims) < 1:
            raise ValueError(
                "GatedFFN: embed_dims and hidden_dims must be positive, got "
                f"{embed_dims} and {hidden_dims}"
            )
        self.first = nn.Linear(embed_dims, hidden_dims)
        self.second = nn.Linear(hidden_dims, embed_dims)
        self.activation = nn.ReLU() if activation is None else activation
        self.dropout = nn.Dropout(dropout)
        self.skip_closed = skip_closed
        check_activation(self.activation)

    def forward(self, tokens_BND: Tensor, gates_BH: Tensor) -> Tensor:
        """See `gated_ffn`."""
        out_BND = gated_ffn(
            tokens_BND,
            gates_BH,
            first=self.first,
            activation=nn.Sequential(self.activation, self.dropout),
            second=self.second,
            skip_closed=self.skip_closed and not self.training,
        )
        return self.dropout(out_BND)


def gated_ffn(
    tokens_BND: Tensor,
    gates_BH: Tensor,
    *,
    first: nn.Linear,
    activation: nn.Module,
    second: nn.Linear,
    skip_closed: bool = False,
) -> Tensor:
    """second(activation(g(x) * first(tokens))).

    Args:
        tokens_BND: Tokens, batch first.
        gates_BH: Gates of the hidden channels.
        first: D -> H.
        activation: Keeps zero at zero; may drop out.
        second: H -> D.
        skip_closed: Compute open channels only, image by image.

    Returns:
        out_BND: With a gate of zero a hidden channel adds nothing.
    """
    if not skip_closed:
        hidden_BNH = first(tokens_BND)
        hidden_BNH = hidden_BNH * gates_BH.to(hidden_BNH.dtype)[:, None, :]
        return second(activation(hidden_BNH))
    outputs = []
    for tokens_ND, gates_H in zip(tokens_BND, gates_BH, strict=True):
        open_O = gates_H.nonzero().squeeze(1)
        hidden_NO = functional.linear(
            tokens_ND, first.weight.index_select(0, open_O), _chosen(first.bias, open_O)
        )
        hidden_NO = hidden_NO * gates_H.index_select(0, open_O).to(hidden_NO.dtype)
        outputs.append(
            functional.linear(
                activation(hidden_NO),
                second.weight.index_select(1, open_O),
                second.bias,
            )
        )
    return torch.stack(outputs)


def _chosen(bias_H: Tensor | None, open_O: Tensor) -> Tensor | None:
    return None if bias_H is None else bias_H.index_select(0, open_O)
