"""Sigmoid focal loss (RetinaNet, arXiv 1708.02002, eq. 5) with integer targets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def sigmoid_focal_loss_forward(
    input: Tensor,  # noqa: A002 - mmcv's argument name
    target: Tensor,
    weight: Tensor,
    output: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Writes the loss of every logit into ``output``.

    Args:
        input: Logits, ``(rows, classes)``.
        target: Class index of each row; any other number is background, ``(rows,)``.
        weight: Weight of each target class, ``(classes,)``, or empty.
        output: Filled with the loss, ``(rows, classes)``.
        gamma: Focusing exponent.
        alpha: Share of the positive term.
    """
    logits, positive = _prepare(input, target)
    # The log-sigmoid stays exact where log(1 - p) of a float32 p has no digits left.
    positive_term = logits.neg().sigmoid().pow(gamma) * logsigmoid(logits)
    negative_term = logits.sigmoid().pow(gamma) * logsigmoid(-logits)
    loss = torch.where(positive, -alpha * positive_term, (alpha - 1) * negative_term)
    output.copy_(_weighted(loss, target, weight))


def sigmoid_focal_loss_backward(
    input: Tensor,  # noqa: A002 - mmcv's argument name
    target: Tensor,
    weight: Tensor,
    grad_input: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Writes the derivative of every loss by its logit into ``grad_input``.

    Args:
        input: As in the forward.
        target: As in the forward.
        weight: As in the forward.
        grad_input: Filled with the derivative, ``(rows, classes)``.
        gamma: As in the forward.
        alpha: As in the forward.
    """
    logits, positive = _prepare(input, target)
    p, q = logits.sigmoid(), logits.neg().sigmoid()
    # d/dx of q^gamma log p, and of p^gamma log q, with dp/dx = p q and q = 1 - p.
    positive_term = q.pow(gamma) * (q - gamma * p * logsigmoid(logits))
    negative_term = p.pow(gamma) * (gamma * q * logsigmoid(-logits) - p)
    slope = torch.where(positive, -alpha * positive_term, (alpha - 1) * negative_term)
    grad_input.copy_(_weighted(slope, target, weight))


def _prepare(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits in float32 or wider and where the target class is."""
    classes = torch.arange(logits.size(1), device=target.device)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype), target[:, None] == classes


def _weighted(values: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Multiplies each row by the weight of its target class, background by one."""
    if weight.numel() == 0:
        return values
    # The compiled op reads past the weights for a background row.
    known = (target >= 0) & (target < weight.numel())
    rows = torch.where(known, weight[target.where(known, 0)], 1)
    return values * rows[:, None]
