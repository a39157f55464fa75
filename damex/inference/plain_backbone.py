"""A TimmBackbone without damex: timm's network, built by mmengine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mmdet.registry import MODELS
from torch import Tensor

from damex.errors import ConfigError
from damex.models.timm_backbone import TimmBackbone

KEYS = "backbone.net."  # of TimmBackbone in a state dict
# mmengine imports and calls a type with a dot.
TYPE = "timm.create_model"


def plain_backbone(backbone: TimmBackbone, divisor: int) -> dict[str, Any]:
    """Config of timm's network that returns the same features as a TimmBackbone.

    A TimmBackbone pads images to whole strides; so does a data preprocessor whose
    ``pad_size_divisor`` (``divisor``) is a multiple of them.

    Raises:
        ConfigError: If the features would differ.
    """
    step = max(32, *backbone.reductions)
    if divisor % step:
        raise ConfigError(
            f"the detector's TimmBackbone pads images to multiples of {step} by "
            "itself, which no backbone of mmdet does; with data_preprocessor."
            f"pad_size_divisor={step} instead of {divisor} in its training it could be "
            "exported."
        )
    config = dict(
        type=TYPE,
        model_name=backbone.name,
        features_only=True,
        pretrained=False,
        out_indices=backbone.out_indices,
        **backbone.options,
    )
    if not _is_equal(backbone, config, sides=(step, 2 * step)):
        raise ConfigError(
            f"the detector's TimmBackbone {backbone.name!r} needs damex: timm's "
            "network alone does not give the same maps. Convolutional networks "
            "(EfficientNet, ConvNeXt, ResNet) can be exported."
        )
    return config


@torch.no_grad()
def _is_equal(
    backbone: TimmBackbone, config: Mapping[str, Any], *, sides: tuple[int, int]
) -> bool:
    """Whether both return the same features of a random image, padded or not."""
    try:
        plain = MODELS.build(dict(config)).eval()
        plain.load_state_dict(backbone.net.state_dict())
        noise = torch.rand(1, 3, *sides, generator=torch.Generator().manual_seed(0))
        pairs = [*zip(backbone(noise), plain(noise), strict=True)]
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return False  # e.g. fixed input size
    return all(_is_near(one, other) for one, other in pairs)


def _is_near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4)
