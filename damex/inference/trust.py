"""What damex builds from a checkpoint of unknown origin: an allow-list.

A config names classes, and mmengine takes an unknown name for an import path. Classes
also read, fetch or write what their arguments name. So a config is used only if each
``type`` is in `TYPES`, and each text is an argument in `TEXTS`; numbers lead nowhere.
To allow another class, review what it does with its texts and nested dicts, then add
it to its slot, and its harmless texts to `TEXTS`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import mmdet.registry
from mmengine.registry import Registry

from damex.config_files import KEYS
from damex.errors import DataError, printable

DETECTORS = "DETR DeformableDETR ConditionalDETR DABDETR DINO DDQDETR"
LOSSES = """
    FocalLoss CrossEntropyLoss QualityFocalLoss VarifocalLoss
    L1Loss SmoothL1Loss IoULoss GIoULoss DIoULoss CIoULoss
"""
INITIALIZERS = """
    Constant Xavier Normal TruncNormal Uniform Kaiming Caffe2Xavier Pretrained
"""
DATASETS = "CocoDataset VOCDataset ConcatDataset RepeatDataset ClassBalancedDataset"
TRANSFORMS = """
    LoadImageFromFile LoadAnnotations LoadEmptyAnnotations FilterAnnotations
    PackDetInputs Resize FixShapeResize FixScaleResize RandomChoiceResize Pad Normalize
    RandomFlip RandomCrop RandomShift RandomAffine RandomErasing Expand CutOut
    MinIoURandomCrop PhotoMetricDistortion YOLOXHSVRandomAug ResizeShortestEdge
    CachedMosaic CachedMixUp Compose RandomChoice RandomApply
"""
SCHEDULERS = """
    ConstantLR CosineAnnealingLR CosineRestartLR ExponentialLR LinearLR MultiStepLR
    OneCycleLR PolyLR ReduceOnPlateauLR StepLR
"""
HOOKS = """
    IterTimerHook LoggerHook ParamSchedulerHook CheckpointHook DistSamplerSeedHook
    DetVisualizationHook EMAHook EarlyStoppingHook SyncBuffersHook EmptyCacheHook
    NumClassCheckHook
"""

# Registry, slot (the key at which a type or a dict with a type stands), and the types
# allowed there. Classes of damex are allowed in all slots of their registry.
_TABLE = (
    ("MODELS", "model", DETECTORS),
    ("MODELS", "data_preprocessor", "DetDataPreprocessor"),
    ("MODELS", "batch_augments", "BatchFixedSizePad BatchSyncRandomResize"),
    (
        *("MODELS", "backbone"),
        "ResNet ResNetV1d ResNeXt Res2Net RegNet SwinTransformer MobileNetV2 "
        "EfficientNet PyramidVisionTransformer PyramidVisionTransformerV2",
    ),
    ("MODELS", "neck", "ChannelMapper FPN"),
    (
        *("MODELS", "bbox_head"),
        "DETRHead DeformableDETRHead ConditionalDETRHead DABDETRHead DINOHead "
        "DDQDETRHead",
    ),
    ("MODELS", "loss_cls loss_bbox loss_iou", LOSSES),
    ("MODELS", "norm_cfg post_norm_cfg", "BN BN2d SyncBN GN LN"),
    ("MODELS", "conv_cfg", "Conv2d"),
    ("MODELS", "act_cfg", "ReLU LeakyReLU PReLU GELU SiLU Swish Sigmoid"),
    ("MODELS", "dropout_layer", "Dropout DropPath"),
    ("WEIGHT_INITIALIZERS", "init_cfg override", INITIALIZERS),
    ("TASK_UTILS", "assigner", "HungarianAssigner TopkHungarianAssigner"),
    (
        *("TASK_UTILS", "match_costs"),
        "BBoxL1Cost FocalLossCost ClassificationCost IoUCost",
    ),
    ("TASK_UTILS", "iou_calculator", "BboxOverlaps2D"),
    ("", "nms dqs_cfg", "nms soft_nms"),  # which mmcv looks up among its functions
    (
        *("MODELS", "router gate experts shared_expert losses balance capacity"),
        "",
    ),
    ("MODELS", "embedding", ""),
    ("TRANSFORMS", "pipeline transforms", TRANSFORMS),
    ("DATASETS", "dataset datasets train val test", DATASETS),
    ("DATA_SAMPLERS", "sampler", "DefaultSampler InfiniteSampler"),
    ("DATA_SAMPLERS", "batch_sampler", "AspectRatioBatchSampler"),
    ("", "collate_fn", "pseudo_collate default_collate"),  # mmengine's functions
    ("RUNNERS", "runner_type", ""),
    ("LOOPS", "train_cfg", "EpochBasedTrainLoop IterBasedTrainLoop"),
    ("LOOPS", "val_cfg", "ValLoop"),
    ("LOOPS", "test_cfg", "TestLoop"),
    ("METRICS", "val_evaluator test_evaluator", ""),
    ("OPTIM_WRAPPERS", "optim_wrapper", "OptimWrapper AmpOptimWrapper"),
    (
        *("OPTIM_WRAPPER_CONSTRUCTORS", "constructor"),
        "DefaultOptimWrapperConstructor LearningRateDecayOptimizerConstructor",
    ),
    ("OPTIMIZERS", "optimizer", "AdamW Adam SGD"),
    ("PARAM_SCHEDULERS", "param_scheduler", SCHEDULERS),
    ("HOOKS", "custom_hooks", HOOKS),
    (
        *("MODELS", "ema_type"),
        "ExponentialMovingAverage ExpMomentumEMA StochasticWeightAverage",
    ),
    ("VISUALIZERS", "visualizer", "DetLocalVisualizer"),
    ("VISBACKENDS", "vis_backends", "LocalVisBackend TensorboardVisBackend"),
    ("LOG_PROCESSORS", "log_processor", "LogProcessor"),
)
TYPES: Mapping[str, tuple[str, frozenset[str]]] = MappingProxyType(
    {
        slot: (registry, frozenset(names.split()))
        for registry, slots, names in _TABLE
        for slot in slots.split()
    }
)
"""Registry and allowed types of each slot."""

LOOKED_UP = ("constructor", "runner_type", "ema_type")  # their text is a type
SAME_SLOT = MappingProxyType({"default_hooks": "custom_hooks"})  # a dict of hooks

ENTRY = "name group root format data_root train val test img classes"  # of a mixture
COCO = "ann_file data_root data_prefix metainfo"
# Types, or slots of dicts without a type; and their arguments that may be texts.
_TEXTS = (
    ("", "label_space log_level experiment_name data_check console sync_bn"),
    ("mixture datasets", ENTRY),
    ("MixtureDataset", "split on_bad_box label_space"),
    ("CocoDataset VOCDataset", COCO),
    ("ConcatDataset", "ignore_keys"),
    ("TimmBackbone", "name act_layer norm_layer"),
    ("ResNet ResNetV1d ResNeXt Res2Net", "style"),
    ("RegNet EfficientNet", "arch style"),
    ("ChannelMapper", "bias"),
    ("FPN", "add_extra_convs"),
    ("upsample_cfg", "mode"),
    ("decoder", "query_scale_type"),
    (LOSSES, "reduction mode"),
    ("BBoxL1Cost", "box_format"),
    ("IoUCost", "iou_mode"),
    ("label_prior", "source"),
    (INITIALIZERS, "layer name mode nonlinearity distribution prefix"),
    ("LoadImageFromFile", "color_type imdecode_backend"),
    ("LoadAnnotations", "box_type imdecode_backend"),
    ("PackDetInputs", "meta_keys"),
    ("Resize FixShapeResize FixScaleResize", "interpolation backend"),
    ("ResizeShortestEdge", "interpolation backend"),
    ("Pad", "padding_mode"),
    ("RandomFlip", "direction"),
    ("RandomCrop", "crop_type"),
    ("MixtureSampler", "sampling"),
    ("AmpOptimWrapper", "dtype loss_scale"),
    ("ReduceOnPlateauLR", "monitor rule threshold_rule"),
    ("OneCycleLR", "anneal_strategy"),
    ("CheckpointHook", "save_best rule"),
    ("EarlyStoppingHook", "monitor rule"),
    ("MixtureMetric", "backend"),
    ("DetLocalVisualizer", "name"),
    ("dist_cfg", "backend"),
    ("mp_cfg", "mp_start_method"),
)
TEXTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        owner: frozenset(arguments.split())
        for owners, arguments in _TEXTS
        for owner in owners.split() or [owners]
    }
)
"""Arguments that may be texts, by type, or by slot of a dict without a type."""

MOE = "moe"  # read by damex, which takes a text as a choice
# Names of classes, of parameters and of folders: nothing in them is built.
DATA = ("label_space", "rename", "img", "data_prefix", "metainfo", "custom_keys")
_OF_TIMM = """
    type name out_indices pretrained frozen_stages norm_eval channels_last cache_mib
    drop_rate drop_path_rate drop_block_rate attn_drop_rate proj_drop_rate
    patch_drop_rate in_chans img_size patch_size window_size output_stride
    act_layer norm_layer conv_bias ls_init_value layer_scale_init_value
"""
OF_TIMM = frozenset(_OF_TIMM.split())
"""Options of a TimmBackbone; others lead to files and addresses."""

# Tables of mmengine, not addresses.
PUBLISHED = re.compile(r"(torchvision|open-mmlab)://[\w/.-]+")


def check_parts(parts: Mapping[str, Any], *, where: str) -> None:
    """Reject keys of a config that would build or reach what is not allowed.

    ``where`` is the origin of the config, for error messages.

    Raises:
        DataError: If a type or a text is not in the allow-list.
    """
    for key, value in parts.items():
        _check(value, str(key), "", _place("", key), where)


def without_unread(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a config to the keys that damex and mmengine read."""
    return {key: value for key, value in config.items() if key in KEYS}


def forget_pretrained(
    part: Any, *, keep_published: bool = False, place: str = "model"
) -> Iterator[str]:
    """Remove files and addresses of initial weights from a model config, in place.

    Yields the places. ``keep_published`` keeps weights that a library knows by name.
    """
    items = part.items() if isinstance(part, dict) else enumerate(part)
    for key, value in [*items]:
        here = _place(place, key)
        if key == "init_cfg" and _reads(value, keep_published):
            del part[key]
            yield here
        elif key == "pretrained" and _names_weights(value, keep_published):
            part[key] = False if part.get("type") == "TimmBackbone" else None
            yield here
        elif isinstance(value, (dict, list, tuple)):
            yield from forget_pretrained(
                value, keep_published=keep_published, place=here
            )


def _reads(value: Any, keep_published: bool) -> bool:
    """Whether an ``init_cfg`` reads a file or an address, at any depth."""
    if isinstance(value, dict):
        if "checkpoint" in value and _names_weights(
            value["checkpoint"], keep_published
        ):
            return True
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return False
    return any(_reads(item, keep_published) for item in value)


def _names_weights(value: Any, keep_published: bool) -> bool:
    """Whether a value leads to initial weights, other than published ones."""
    if keep_published:
        return isinstance(value, str) and PUBLISHED.fullmatch(value) is None
    return value is not None and value is not False


def _check(value: Any, key: str, owner: str | None, place: str, where: str) -> None:
    """Check the value of ``key`` in a dict of type (or at slot) ``owner``.

    The owner of names and folders (`DATA`) is None, that of the whole config "".
    """
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check(item, key, owner, f"{place}[{number}]", where)
    elif isinstance(value, dict) and (key in DATA or owner is None):
        for name, item in value.items():
            _check_text(str(name), key, None, place, where)
            _check(item, key, None, _place(place, name), where)
    elif isinstance(value, dict):
        inside = _owner(value, key, owner, place, where)
        for name, item in value.items():
            if inside == "TimmBackbone" and name not in OF_TIMM:
                _refuse(item, _place(place, name), where)
            if name != "type":
                _check(item, str(name), inside, _place(place, name), where)
    else:
        _check_value(value, key, owner, place, where)


def _check_value(
    value: Any, key: str, owner: str | None, place: str, where: str
) -> None:
    if key in LOOKED_UP and value is not None:
        _check_type(value, key, place, where)
    elif isinstance(value, str):
        _check_text(value, key, owner, place, where)
    elif not isinstance(value, int | float | None):
        _refuse(value, place, where)


def _owner(
    value: Mapping[str, Any], key: str, owner: str | None, place: str, where: str
) -> str:
    """Name what takes the items of a dict: its type, which is checked, or its slot."""
    if "type" in value:
        slot = SAME_SLOT.get(owner or "", key)
        _check_type(value["type"], slot, f"{place}.type", where)
        return value["type"]
    return MOE if owner == MOE else key  # damex knows all keys below moe


def _check_type(kind: Any, slot: str, place: str, where: str) -> None:
    registry, allowed = TYPES.get(slot, ("", frozenset[str]()))
    if not isinstance(kind, str) or kind not in {*allowed, *_of_damex(registry)}:
        _refuse(kind, place, where, slot)


def _check_text(text: str, key: str, owner: str | None, place: str, where: str) -> None:
    if key == "checkpoint" and PUBLISHED.fullmatch(text):
        return
    if key == "default_scope" and text in ("mmdet", "mmengine"):
        return
    is_allowed = (
        owner in (None, MOE)
        or key in TEXTS.get(owner or "", ())
        or owner in _of_damex("MODELS", package="damex.moe")  # takes choices only
    )
    if not is_allowed or printable(text) != text or "://" in text:
        _refuse(text, place, where)


def _of_damex(registry: str, package: str = "damex") -> Collection[str]:
    """Names of the classes of damex in a registry of mmdet or mmengine."""
    found = getattr(mmdet.registry, registry, None)
    names: set[str] = set()
    while isinstance(found, Registry):
        known = found.module_dict.items()
        names |= {
            name for name, one in known if one.__module__.startswith(f"{package}.")
        }
        found = found.parent
    return names


def _place(place: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{place}.{key}" if place else key
    return f"{place}[{key!r:.80}]"


def _refuse(value: Any, place: str, where: str, slot: str | None = None) -> None:
    what = f"{place}={value!r:.80}"
    why = "which is not among the arguments"
    if slot is not None:
        why = f"which is not among the types of the slot {slot}"
    raise DataError(
        f"the config in {where} has {what}, {why} that damex accepts from a "
        "checkpoint, and was not used: it could run code, or reach files and "
        "addresses. If you trust whoever made the checkpoint, add --trust (in Python: "
        "trust=True)."
    )
