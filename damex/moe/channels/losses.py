"""The two losses of DeepMoE (Wang et al. 2019): sparse gates and class presence.

Axes: B images, C channels of a layer, E entries of the embedding.

Computed in float32 or wider, as a sum over channels overflows half precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def gate_l1(gates: Sequence[Tensor]) -> Tensor:
    """The sparsity penalty sum_l ||g^l(x)||_1 of the gates (B, C) of each layer.

    Summed over channels and layers and averaged over the batch, so it grows with width
    and depth of the network; its weight in the paper, 1e-3, is for this reduction.
    Raises ValueError without any layer.
    """
    if len(gates) == 0:
        raise ValueError("gate_l1: needs the gates of one or more layers, got none")
    return torch.stack([_wide(gates_BC).sum(dim=1) for gates_BC in gates]).sum(0).mean()


def presence_loss(logits_BE: Tensor, present_BE: Tensor) -> Tensor:
    """Cross-entropy of softmax(e(x)) with the classes present in the image, evenly.

    With one class per image it is the auxiliary loss of the paper; with several the
    target is uniform over them. The softmax leaves the mean of e(x) free: a sigmoid per
    class would decrease e(x) for the many absent classes, and so close the gates ReLU(W
    e(x)), whose weights are positive on average.

    Returns the mean over images with a class, zero with a graph without any. Raises
    ValueError if the shapes of logits and bool targets differ.
    """
    if logits_BE.shape != present_BE.shape:
        raise ValueError(
            f"presence_loss: present_BE must have the shape {tuple(logits_BE.shape)} "
            f"of the logits, got {tuple(present_BE.shape)}"
        )
    logits_BE = _wide(logits_BE)
    present_BE = present_BE.to(logits_BE.dtype)
    count_B = present_BE.sum(dim=1)
    target_BE = present_BE / count_B.clamp(min=1.0)[:, None]
    losses_B = -(target_BE * functional.log_softmax(logits_BE, dim=1)).sum(dim=1)
    return losses_B.sum() / (count_B > 0).sum().clamp(min=1)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def active_share(gates: Sequence[Tensor]) -> Tensor:
    """Share of open channels, over all layers and images, in [0, 1]."""
    return torch.cat([gates_BC > 0 for gates_BC in gates], dim=1).float().mean()
