"""Families of Transformers detectors: their configs, models from them, and weights.

A family is here once the tests have proven it; others are refused by name. Transformers
is imported when a detector is built, since damex does not need it otherwise.

Weights (``load_from="hf://..."``, a folder or a name on the hub) become a checkpoint of
a :class:`MoETransformersDetector`, with the names of their classes, so that classes
load by name as from any other checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import Any

from mmengine.runner import CheckpointLoader
from torch import nn

from damex.errors import ConfigError, DataError, check_known
from damex.hf.layouts import DeformableEncoder, HybridEncoder, WindowedBackbone
from damex.models.timm_backbone import TimmBackbone, create_features

PREFIX = "hf://"
LOSSES = "transformers.loss.loss_"
# By ``model_type``.
FAMILIES: Mapping[str, HybridEncoder | WindowedBackbone] = MappingProxyType(
    {
        "rt_detr_v2": HybridEncoder(f"{LOSSES}rt_detr:RTDetrLoss"),
        "d_fine": HybridEncoder(f"{LOSSES}d_fine:DFineLoss"),
        "deimv2": HybridEncoder(f"{LOSSES}deimv2:Deimv2Loss"),
        "rf_detr": WindowedBackbone(),
        "deformable_detr": DeformableEncoder(
            f"{LOSSES}deformable_detr:DeformableDetrImageLoss"
        ),
    }
)
BACKBONES = ("rt_detr_resnet", "hgnet_v2", "rf_detr_dinov2", "resnet", "timm_backbone")
# Set by damex, or of no use to it.
LEFT_OUT = frozenset(
    {"id2label", "label2id", "num_labels", "architectures", "dtype", "_name_or_path"}
    | {"transformers_version", "model_type", "stage_names", "window_block_indexes"}
    | {"return_dict"}
)


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
    with _named("model.config"):
        model = transformers().AutoModelForObjectDetection.from_config(full)
    FAMILIES[full.model_type].tidy(model)
    _reset_norms(model)
    if timm is not None:
        # Transformers' copy of the net has lost the activations in its norms where it
        # froze them, and its weights are drawn as those of the encoder.
        net = backbone_of(model)
        if hasattr(net.model, "_backbone"):
            net.model._backbone = timm
        else:
            net.model = timm
        _check_strides(timm, full)
    return model


def full_config(
    config: Mapping[str, Any], num_classes: int, timm: TimmBackbone | None = None
) -> Any:
    """Build the Transformers config of :func:`build_model`, with its errors."""
    config = dict(config)
    backbone = config.pop("backbone_config", None)
    kind = _config_class(config, "model.config", [*FAMILIES])
    if backbone is not None:
        config["backbone_config"] = _backbone_config(backbone)
    if timm is not None:
        config["backbone_config"] = _timm_config(timm, backbone)
    with _named("model.config"):
        full = kind(**_arguments(config, kind, "model.config"), num_labels=num_classes)
    found, layout = full.backbone_config.model_type, FAMILIES[full.model_type]
    if timm is not None:
        found = type(timm).__name__
    if found not in layout.backbones:
        raise ConfigError(
            f"the model's backbone is a {found!r}, but backbones of "
            f"{full.model_type!r} are {', '.join(layout.backbones)}."
        )
    layout.check(full)
    return full


def plain_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a Transformers ``config.json`` sets, for :func:`build_model`.

    Raises:
        ConfigError: If the family or backbone is not supported.
    """
    kind = _config_class(values, "the model", [*FAMILIES])
    backbone, name = values.get("backbone_config"), values.get("backbone")
    can_name = "timm_backbone" in FAMILIES[kind.model_type].backbones
    if backbone is None and name is not None and can_name:  # as older versions save
        backbone = kind.from_dict(dict(values)).backbone_config.to_dict()
        values = {**values, "backbone_config": backbone}
    if backbone is not None:
        inner = _config_class(backbone, "the model's backbone_config", BACKBONES)
    elif name is not None:
        raise ConfigError(
            f"the model's backbone is {name!r}, a name, not a "
            "backbone_config; save the model with a newer Transformers."
        )
    own = {*kind().to_dict(), "backbone_config"}
    full = kind.from_dict({k: v for k, v in values.items() if k in own}).to_dict()
    found = _set_values(full, kind)
    if backbone is not None:
        found["backbone_config"] = _set_values(full["backbone_config"], inner)
    return found


def backbone_of(model: Any) -> Any:
    """Return the module whose ``model`` is the backbone."""
    parts = model.model
    return parts.conv_encoder if hasattr(parts, "conv_encoder") else parts.backbone


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Name the place of an error: Transformers' checks raise many types."""
    try:
        yield
    except ConfigError:  # names its place itself
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error


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
    with _named(where):
        found = kind(**_arguments(config, kind, where))
    if kind.model_type == "timm_backbone":
        _check_net(found)
    return found


def _check_net(config: Any) -> None:
    """Reject nets that timm would fetch, or that Transformers changes.

    It freezes batch norms by others, which do not have timm's activations.
    """
    net = create_features(str(config.backbone), (*config.out_indices,))
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    if any(hasattr(norm, "act") for norm in norms):
        raise ConfigError(
            f"model.config.backbone_config.backbone is {config.backbone!r}, whose "
            "batch norms lose their activations in Transformers; set model.backbone="
            f"dict(type='TimmBackbone', name={config.backbone!r}) in its place."
        )


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
    if timm.reductions != [*getattr(config, "feat_strides", timm.reductions)]:
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
    more = {"backbone_config", "out_features", "out_indices"}
    known = sorted({*kind().to_dict(), *more})
    found = {key: value for key, value in config.items() if key not in LEFT_OUT}
    for key in found:
        check_known(key, known, f"{where}.{key} is unknown to {kind.__name__}")
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


def read_config(name: str) -> dict[str, Any]:
    """Read the config of a folder, or of a name on the hub, as plain values.

    Raises:
        DataError: If it cannot be read.
        ConfigError: If damex does not support its family.
    """
    return _read(lambda one, **_: plain_config(_values_of(one)), name)


def load_from_transformers(path: str, map_location: Any = None) -> dict[str, Any]:
    """Load ``hf://NAME``, a folder or a name on the hub, as a checkpoint of damex.

    Weights are read from safetensors, never from pickles, and converted from the names
    of older versions by Transformers. Of the config, only plain values are used: others
    could name kernels or repositories to fetch.

    Raises:
        DataError: If the files cannot be read, or weights are missing.
        ConfigError: If damex does not support the family.
    """
    name = path.removeprefix(PREFIX)
    plain = read_config(name)  # rejects an unsupported family in one line
    names = _values_of(name).get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    labels = {int(number): str(label) for number, label in names.items()}
    classes = tuple(labels.get(n, f"LABEL_{n}") for n in range(len(labels)))
    model, report = _read(
        transformers().AutoModelForObjectDetection.from_pretrained,
        name,
        config=full_config(plain, len(classes)),
        use_safetensors=True,
        output_loading_info=True,
    )
    missing = {m for m in report["missing_keys"] if not m.endswith("_batches_tracked")}
    if missing:
        raise DataError(
            f"{name}: {len(missing)} weights are missing, such as {min(missing)}; "
            "fetch the folder again."
        )
    FAMILIES[model.config.model_type].tidy(model)
    state = {f"detr.{key}": value for key, value in model.state_dict().items()}
    return dict(state_dict=state, meta=dict(dataset_meta=dict(classes=classes)))


def _values_of(name: str) -> dict[str, Any]:
    """Return the content of ``config.json``; ValueError if there is none."""
    values, _ = transformers().PreTrainedConfig.get_config_dict(name)
    if "model_type" not in values:
        raise ValueError("config.json with a model_type was not found.")
    return values


def _read(reader: Callable[..., Any], name: str, **options: Any) -> Any:
    try:
        return reader(name, trust_remote_code=False, **options)
    except ConfigError:
        raise
    except Exception as error:  # a damaged file raises many types
        reason = " ".join(str(error).split())
        raise DataError(
            f"{name} is not a folder with a Transformers detector, or is damaged, and "
            f"cannot be fetched from the hub: {reason} Without access to the hub, "
            "fetch it elsewhere, and name the folder: model.name=FOLDER."
        ) from error


CheckpointLoader.register_scheme(PREFIX, load_from_transformers, force=True)
