"""From router logits to a scalar: the steps that routing losses share.

Axes: B images, N tokens per image, T = B*N tokens, V valid tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def valid_logits(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """Picks the rows of valid tokens, in float32 or wider.

    Rows are taken out, not multiplied by zero: a sum over the rest then does not depend
    on how many padded rows there were, and a NaN in one of them cannot leak into
    gradients.

    Args:
        logits_TE: Router logits.
        valid_T: True for tokens that count; None for all of them.

    Returns:
        logits_VE: At least float32.
    """
    if valid_T is not None:
        logits_TE = logits_TE[valid_T]
    return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))


def mean_over_tokens(values_V: Tensor) -> Tensor:
    """The mean, or a zero that is attached to the graph when there is no token."""
    return values_V.sum() / max(values_V.shape[0], 1)


def squared_cv(values_E: Tensor) -> Tensor:
    """Squared coefficient of variation, Var / (Mean^2 + 1e-10).

    The variance is the population one, as in V-MoE, so one expert gives 0. (Tutel, and
    with it DAMEX, divides by E - 1.)
    """
    variance = values_E.var(correction=0)
    return variance / (values_E.mean().square() + 1e-10)
