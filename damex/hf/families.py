"""Families of Transformers detectors: their configs, their parts, their losses.

A family is here once the tests have proven it; others are refused by name. Transformers
is imported when a detector is built, since damex does not need it otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from torch import nn

from damex.errors import ConfigError, did_you_mean
from damex.models.timm_backbone import TimmBackbone

RF_DETR = "rf_detr"
# By ``model_type``: the class with the losses. Others than RF-DETR have the same parts.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "rt_detr_v2": "transformers.loss.loss_rt_detr.RTDetrLoss",
        "d_fine": "transformers.loss.loss_d_fine.DFineLoss",
        "deimv2": "transformers.loss.loss_deimv2.Deimv2Loss",
        RF_DETR: "transformers.loss.loss_lw_detr.LwDetrImageLoss",
    }
)
BACKBONES = ("rt_detr_resnet", "hgnet_v2", "rf_detr_dinov2")
# Set by damex, or of no use to it.
LEFT_OUT = frozenset(
    {"id2label", "label2id", "num_labels", "architectures", "dtype", "_name_or_path"}
    | {"transformers_version", "model_type", "stage_names", "window_block_indexes"}
    | {"return_dict"}
)
# Names of the detector's heads: of the layers, and of the cells that become queries.
CLASS_HEADS = ("model.decoder.class_embed", "model.enc_score_head")
RF_DETR_HEADS = ("class_embed", "model.enc_out_class_embed")
CLASS_ROWS = (*CLASS_HEADS, *RF_DETR_HEADS, "model.denoising_class_embed")
# Second names of modules in `model.decoder`, which no forward reads.
ALIASES = ("class_embed", "bbox_embed")


def transformers() -> Any:
    """Import Transformers; ConfigError if it is not installed."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "model.type='MoETransformersDetector' needs Transformers, which cannot be "
            f"imported ({error}); install it: pip install 'damex[hf]'."
        ) from error


def build_model(
    config: Mapping[str, Any], num_classes: int, timm: TimmBackbone | None = None
) -> Any:
    """Build a plain detector with random weights.

    ``config`` has a ``model_type`` and the arguments of its Transformers config; what
    is left out has the default of the family. ``timm`` is the backbone in the place of
    a ``backbone_config``. Nothing is read or fetched.

    Raises:
        ConfigError: If the family or the backbone is not supported, or an argument is
            unknown, invalid or does not fit the others.
    """
    full = full_config(config, num_classes, timm)
    try:
        model = transformers().AutoModelForObjectDetection.from_config(full)
    except Exception as error:  # as above
        raise ConfigError(f"model.config: {' '.join(str(error).split())}") from error
    without_aliases(model)
    _reset_norms(model)
    if full.model_type == RF_DETR:
        _freeze_unused(model)
    if timm is not None:
        # Transformers' copy of the net has lost the activations in its norms where it
        # froze them, and its weights are drawn as those of the encoder.
        backbone_of(model).model._backbone = timm
        _check_strides(timm, full)
    return model


def full_config(
    config: Mapping[str, Any], num_classes: int, timm: TimmBackbone | None = None
) -> Any:
    """Build the Transformers config of :func:`build_model`.

    Raises:
        ConfigError: As there.
    """
    config = dict(config)
    backbone = config.pop("backbone_config", None)
    kind = _config_class(config, "model.config", [*FAMILIES])
    if backbone is not None:
        config["backbone_config"] = _backbone_config(backbone)
    if timm is not None:
        config["backbone_config"] = _timm_config(timm, backbone)
    try:
        full = kind(**_arguments(config, kind, "model.config"), num_labels=num_classes)
    except Exception as error:  # the checks of a config raise many types
        raise ConfigError(f"model.config: {' '.join(str(error).split())}") from error
    _check_parts(full)
    return full


def without_aliases(model: Any) -> None:
    """Remove second names of modules, so that each parameter has one name."""
    for name in ALIASES:
        if hasattr(model, name) and hasattr(model.model.decoder, name):
            delattr(model, name)


def plain_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a Transformers ``config.json`` sets, for :func:`build_model`.

    Raises:
        ConfigError: If the family or backbone is not supported.
    """
    kind = _config_class(values, "the model", [*FAMILIES])
    backbone = values.get("backbone_config")
    if backbone is not None:
        inner = _config_class(backbone, "the model's backbone_config", BACKBONES)
    elif values.get("backbone") is not None:
        raise ConfigError(
            f"the model's backbone is {values['backbone']!r}, a name, not a "
            "backbone_config; save the model with a newer Transformers."
        )
    own = {*kind().to_dict(), "backbone_config"}
    full = kind.from_dict({k: v for k, v in values.items() if k in own}).to_dict()
    found = _set_values(full, kind)
    if backbone is not None:
        found["backbone_config"] = _set_values(full["backbone_config"], inner)
    return found


def sites_of(model: Any) -> dict[str, list[nn.Module]]:
    """Return the transformer layers of encoder and decoder, each with an ``mlp``.

    RF-DETR has no encoder. In its place are the blocks of its backbone behind the last
    but one feature map.
    """
    if model.config.model_type == RF_DETR:
        blocks = model.model.backbone.backbone.encoder.layer
        first, last = [0, *_outputs_of(model)][-2:]
        return dict(
            encoder=[*blocks[first:last]], decoder=[*model.model.decoder.layers]
        )
    return dict(
        encoder=[one for aifi in model.model.encoder.aifi for one in aifi.layers],
        decoder=[*model.model.decoder.layers],
    )


def backbone_of(model: Any) -> Any:
    """Return the module whose ``model`` is the backbone."""
    parts = model.model
    return parts.conv_encoder if hasattr(parts, "conv_encoder") else parts.backbone


def class_heads(model: Any) -> list[nn.Module]:
    """Return the linear classifiers, the one that selects the queries last.

    In RF-DETR all layers have one, and each group of queries has its own selection.
    """
    if model.config.model_type == RF_DETR:
        return [model.class_embed, *model.model.enc_out_class_embed]
    layers, cells = map(model.get_submodule, CLASS_HEADS)
    return [*layers.children(), cells]


def criterion_of(model: Any) -> Any:
    """Return the class whose ``get_loss`` computes a model's losses."""
    module, _, name = FAMILIES[model.config.model_type].rpartition(".")
    return getattr(import_module(module), name)


def strides_of(config: Any) -> list[int]:
    """Return the strides of the feature maps whose cells become queries."""
    if config.model_type == RF_DETR:
        return [config.backbone_config.patch_size]
    strides = [*config.feat_strides]
    while len(strides) < config.num_feature_levels:
        strides.append(2 * strides[-1])
    return strides


def windows_of(config: Any) -> int:
    """Return how many windows a side of an image has in the backbone."""
    return getattr(config.backbone_config, "num_windows", 1)


def counted_queries(config: Any) -> slice:
    """Return the queries that make detections, of all that a decoder is trained with.

    Denoising queries come before them, the further groups of RF-DETR behind.
    """
    if config.model_type == RF_DETR:
        return slice(config.num_queries)
    return slice(-config.num_queries, None)


def weighted(losses: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return losses whose sum is Transformers' loss; RF-DETR's lack their weights."""
    if config.model_type != RF_DETR:
        return dict(losses)
    weights = {
        "loss_ce": config.class_loss_coefficient,
        "loss_bbox": config.bbox_loss_coefficient,
        "loss_giou": config.giou_loss_coefficient,
    }
    return {
        name: weight * value
        for name, value in losses.items()
        for kind, weight in weights.items()
        if name.startswith(kind)
    }


def _check_parts(config: Any) -> None:
    """Reject parts that do not fit, or that damex does not support."""
    backbone, is_rf_detr = config.backbone_config, config.model_type == RF_DETR
    if (backbone.model_type == BACKBONES[-1]) != is_rf_detr:
        raise ConfigError(
            f"model.config.backbone_config.model_type is {backbone.model_type!r}, but "
            f"{BACKBONES[-1]!r} is the backbone of {RF_DETR!r}, and of no other."
        )
    if is_rf_detr:
        return
    width = config.encoder_hidden_dim
    if {*config.decoder_in_channels} != {width}:
        raise ConfigError(
            f"model.config.decoder_in_channels is {list(config.decoder_in_channels)}, "
            f"but the encoder gives maps of encoder_hidden_dim={width} channels; set "
            "each of them to this number."
        )
    if getattr(config, "encoder_type", "hybrid") != "hybrid":
        raise ConfigError(
            f"model.config.encoder_type is {config.encoder_type!r}, which damex does "
            "not support; it supports 'hybrid'."
        )


def _outputs_of(model: Any) -> list[int]:
    """Return how many blocks of RF-DETR's backbone each feature map has behind it."""
    config = model.config.backbone_config
    return [number % len(config.stage_names) for number in config.out_indices]


def _freeze_unused(model: Any) -> None:
    """Freeze what no forward of RF-DETR reads: DDP expects gradients of the others."""
    backbone = model.model.backbone.backbone
    blocks = backbone.encoder.layer[_outputs_of(model)[-1] :]
    unused = [p for block in blocks for p in block.parameters()]
    if backbone.embeddings.mask_token is not None:
        unused.append(backbone.embeddings.mask_token)
    for parameter in unused:
        parameter.requires_grad_(False)


def _config_class(config: Mapping[str, Any], where: str, known: Sequence[str]) -> Any:
    """Return the class of a config; ConfigError if the family is not supported."""
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if kind not in known:
        raise ConfigError(
            f"{where} has model_type={kind!r}, which damex does not support; it "
            f"supports {', '.join(known)}."
        )
    return transformers().CONFIG_MAPPING[kind]


def _backbone_config(config: Mapping[str, Any]) -> Any:
    """Build the config of a backbone."""
    where = "model.config.backbone_config"
    kind = _config_class(config, where, BACKBONES)
    try:
        return kind(**_arguments(config, kind, where))
    except Exception as error:  # as above
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error


def _timm_config(timm: TimmBackbone, other: Any) -> Any:
    """Build the config of a backbone of timm."""
    if other is not None:
        raise ConfigError(
            "model.backbone and model.config.backbone_config (which model.name sets, "
            "too) are two backbones; leave one of them out."
        )
    kind = transformers().CONFIG_MAPPING["timm_backbone"]
    return kind(backbone=timm.name, out_indices=[*timm.out_indices])


def _check_strides(timm: TimmBackbone, config: Any) -> None:
    if timm.reductions != [*config.feat_strides]:
        raise ConfigError(
            f"model.backbone gives maps of strides {timm.reductions}, but "
            f"model.config.feat_strides is {[*config.feat_strides]}; set "
            "model.backbone.out_indices, or feat_strides."
        )


def _reset_norms(model: nn.Module) -> None:
    """Let batch norms outside of the backbone start as the identity.

    Transformers draws the scales of RT-DETRv2's around 0, with a deviation of 0.01.
    """
    inside = {*backbone_of(model).modules()}
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module not in inside:
            module.reset_parameters()


def _arguments(config: Mapping[str, Any], kind: Any, where: str) -> dict[str, Any]:
    """Return the arguments in a config; Transformers would keep unknown ones silently.

    mmengine's dicts and tuples become plain ones.
    """
    known = {*kind().to_dict(), "backbone_config", "out_features", "out_indices"}
    found = {key: value for key, value in config.items() if key not in LEFT_OUT}
    for key in found:
        if key not in known:
            raise ConfigError(
                f"{where}.{key} is unknown to {kind.__name__}; "
                f"{did_you_mean(key, sorted(known))}"
            )
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def _set_values(values: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the values that differ from the defaults of a config class."""
    usual = kind().to_dict()
    return {"model_type": values["model_type"]} | {
        key: value
        for key, value in values.items()
        if key not in LEFT_OUT and key in usual and value != usual[key]
        if not isinstance(value, Mapping)
    }
