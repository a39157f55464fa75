"""The widening strategies of DeepMoE's Table 1 for VGG-16, and a size that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from damex.studies.deepmoe2019.network import Stages

__all__ = ["STRATEGIES", "VGG", "conv_parameters", "shrink"]

VGG: Stages = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)
# Two widths are lost in the text of the table. The last of W1-High is the one that
# gives it as many weights as W1-Mid and W13-All have (24.2 million both); W4-Low widens
# four layers and shows 512 for the first two of them.
STRATEGIES: Mapping[str, Stages] = MappingProxyType(
    {
        "W1-High": ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512, 512, 2565)),
        "W1-Mid": ((64, 64), (128, 128), (2990, 256, 256), (512,) * 3, (512,) * 3),
        "W4-Low": ((512, 512), (512, 512), (256,) * 3, (512,) * 3, (512,) * 3),
        "W13-All": ((128, 128), (256, 256), (405,) * 3, (615,) * 3, (615,) * 3),
    }
)


def conv_parameters(stages: Stages, *, in_channels: int = 3) -> int:
    """Counts the weights of 3x3 convolutions, without biases.

    Args:
        stages: Widths.
        in_channels: Channels of the image.
    """
    widths = [in_channels, *(width for stage in stages for width in stage)]
    return sum(9 * before * after for before, after in pairwise(widths))


def shrink(stages: Stages, divisor: int) -> Stages:
    """Divides all widths.

    Args:
        stages: Widths.
        divisor: By how much; results are rounded.
    """
    shrunk: list[Sequence[int]] = [
        tuple(max(round(width / divisor), 1) for width in stage) for stage in stages
    ]
    return tuple(shrunk)
