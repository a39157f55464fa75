"""The two losses of DeepMoE (Wang et al. 2019): few channels, and a telling embedding.

Axes: B images, C channels of a layer, E entries of the embedding.

Dtype policy: float32 or wider, as a sum over channels outgrows half precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def gate_l1(gates: Sequence[Tensor]) -> Tensor:
    """The sparsity penalty sum_l ||g^l(x)||_1.

    Reduction: sum over the channels and over the layers, mean over the batch. So it
    grows with the width and depth of the network, and its weight (1e-3 in the paper)
    belongs to this reduction. Gates are never negative, so that the norm is their sum.

    Args:
        gates: Gates (B, C) of each layer.

    Returns:
        loss: Scalar, 0 or more.

    Raises:
        ValueError: If there is no layer.
    """
    if len(gates) == 0:
        raise ValueError("gate_l1: needs the gates of one or more layers, got none")
    return torch.stack([_wide(gates_BC).sum(dim=1) for gates_BC in gates]).sum(0).mean()


def presence_loss(logits_BE: Tensor, present_BE: Tensor) -> Tensor:
    """Cross-entropy between softmax(e(x)) and what is present in the image, evenly.

    For one class per image it is the paper's auxiliary loss, the cross-entropy of the
    embedding's logits. An image of a detection data set has several; its target is
    spread evenly over them. The softmax leaves the mean of e(x) free: a sigmoid per
    class would push e(x) down for the many classes that are absent, and with it shut
    the gates ReLU(W e(x)), whose weights are positive on average.

    Args:
        logits_BE: The embedding e(x).
        present_BE: bool, True for what is present.

    Returns:
        loss: Scalar; the mean over the images in which anything is present, and zero,
            but attached to the graph, if there is none.

    Raises:
        ValueError: If the shapes differ.
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
    """Share of open channels, over all layers and images, in [0, 1].

    Args:
        gates: Gates (B, C) of each layer.

    Returns:
        share: Scalar, float32.
    """
    return torch.cat([gates_BC > 0 for gates_BC in gates], dim=1).float().mean()
