"""The number format of routers: float32 or wider, whatever autocast says.

Routing must not flip between experts because of bfloat16 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def full_precision_linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None
) -> Tensor:
    """`functional.linear` in float32 with autocast off; float64 stays float64.

    Args:
        x: (..., in), of any float dtype.
        weight_OI: (out, in).
        bias_O: Bias per output, or None.

    Returns:
        (..., out), float32 (float64 for float64 input).
    """
    dtype = torch.promote_types(x.dtype, weight_OI.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    bias_O = None if bias_O is None else bias_O.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        return functional.linear(x.to(dtype), weight_OI.to(dtype), bias_O)


def check_sizes(owner: str, **sizes: int) -> None:
    """Raises ValueError, naming the router, unless all sizes are positive."""
    if min(sizes.values()) < 1:
        raise ValueError(
            f"{owner}: {' and '.join(sizes)} must be positive, "
            f"got {' and '.join(str(size) for size in sizes.values())}"
        )
