"""What activations leave a closed channel closed."""

from __future__ import annotations

import torch
from torch import nn


def check_activation(activation: nn.Module) -> None:
    """Refuses an activation behind which a closed channel would not be zero.

    Args:
        activation: Must act on each value alone; that it keeps zero is tested.

    Raises:
        ValueError: If it does not map 0 to 0.
    """
    if activation(torch.zeros(1)).item() != 0.0:
        raise ValueError(
            "a closed channel must stay zero behind the activation, but "
            f"{activation} of 0 is not 0"
        )
