"""Parts of a detector: their widths, and the layers that ``moe.layers`` selects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import ResNet
from torch import nn

from damex.errors import ConfigError

COMPONENTS = ("encoder", "decoder")  # have transformer layers


def check_widths(detector: Any, neck: Mapping[str, Any]) -> None:
    """Raise ConfigError if a part has another number of channels than the encoder."""
    width = detector.embed_dims
    widths = {"neck.out_channels": neck.get("out_channels", width)}
    for name, module in detector.named_modules():
        if name.startswith(("encoder", "decoder", "bbox_head")):
            widths[f"{name}.embed_dims"] = getattr(module, "embed_dims", width)
    for name, found in widths.items():
        if found != width:
            raise ConfigError(
                f"model.{name} is {found}, but the encoder has {width} channels; neck, "
                "encoder, decoder and head need the same number."
            )


def chosen_layers(
    detector: nn.Module, component: str, chosen: Any
) -> Iterator[tuple[str, Any]]:
    """Yield name and module of the transformer layers that ``moe.layers`` selects.

    Raises:
        ConfigError: If a layer does not exist, is wrapped by mmdet's gradient
            checkpointing, or has no FFN of two linear layers.
    """
    existing = getattr(getattr(detector, component, None), "layers", [])
    for number in layer_numbers(chosen, len(existing), component):
        layer = existing[number]
        if "forward" in vars(layer):
            raise ConfigError(
                f"model.{component}.num_cp of mmdet wraps layer {number}, which would "
                "run its experts a second time without their inputs; use a detector "
                "of damex (type='MoEDINO' and so on), or set num_cp=0 and "
                "moe.with_cp=True."
            )
        ffn = getattr(layer, "ffn", None)
        if not isinstance(ffn, FFN):
            raise ConfigError(
                f"moe.layers.{component}: layer {number} ({type(layer).__name__}) has "
                "no mmcv FFN in its attribute 'ffn' (listed twice?)."
            )
        if ffn.num_fcs != 2 or not ffn.add_identity:
            raise ConfigError(
                f"moe.layers.{component}: layer {number} has an FFN with num_fcs="
                f"{ffn.num_fcs} and add_identity={ffn.add_identity}; it must have "
                "num_fcs=2 and add_identity=True."
            )
        yield f"{component}.{number}", layer


def chosen_stages(detector: Any, chosen: Any) -> list[tuple[int, str]]:
    """Return number and attribute of the selected stages of a ResNet.

    Raises:
        ConfigError: If the backbone is not a ResNet, or a stage does not exist.
    """
    backbone = getattr(detector, "backbone", None)
    if not isinstance(backbone, ResNet):
        raise ConfigError(
            "moe.layers.backbone needs a ResNet of mmdet as model.backbone, got "
            f"{type(backbone).__name__}; choose layers of the encoder or decoder."
        )
    names = backbone.res_layers
    return [(n, names[n]) for n in layer_numbers(chosen, len(names), "backbone")]


def layer_numbers(chosen: Any, count: int, component: str) -> Sequence[int]:
    """Resolve a selection of layers (or of backbone stages) to numbers.

    Raises:
        ConfigError: If one of them does not exist.
    """
    words = {"all": range(count), "even": range(0, count, 2), "last": [count - 1]}
    numbers = words[chosen] if isinstance(chosen, str) else chosen
    unit = "stage" if component == "backbone" else "layer"
    for number in numbers:
        if type(number) is not int or not 0 <= number < count:
            raise ConfigError(
                f"moe.layers.{component} names {unit} {number!r}, but the {component} "
                f"has {count} {unit}s: 0 to {count - 1}."
            )
    return numbers
