"""How many channels are open, and whether images open different ones.

Axes: B images, C channels of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def active_share(gates: Sequence[Tensor]) -> Tensor:
    """Share of open channels, over all layers and images, in [0, 1].

    Args:
        gates: Gates (B, C) of each layer.

    Returns:
        share: Scalar, float32.
    """
    return _open(gates).float().mean()


def distinct_patterns(gates: Sequence[Tensor]) -> int:
    """Number of different sets of open channels among the images.

    One pattern for all images would be a pruned network and no mixture: expressive
    power grows with the number of patterns (Wang et al. 2019, appendix A.1).

    Args:
        gates: Gates (B, C) of each layer, of as many images as shall be compared.

    Returns:
        count: 1 to B.
    """
    return int(torch.unique(_open(gates), dim=0).shape[0])


def _open(gates: Sequence[Tensor]) -> Tensor:
    """True for open channels, of all layers side by side."""
    return torch.cat([gates_BC > 0 for gates_BC in gates], dim=1)
