"""What damex reads and builds from the config of a checkpoint of unknown origin.

The config is read as values, never executed. It names classes, and mmengine takes an
unknown name for an import path. Classes also read, fetch or write what their arguments
name. So a config is used only if each ``type`` is in `TYPES`, and each text is an
argument in `TEXTS`; numbers lead nowhere. To allow another class, review what it does
with its texts and nested dicts, then add it to its slot, and its harmless texts to
`TEXTS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import mmdet.registry
from mmengine.config.config import RESERVED_KEYS
from mmengine.registry import Registry

from damex.errors import DataError, printable

LOSSES = """
    FocalLoss CrossEntropyLoss QualityFocalLoss VarifocalLoss
    L1Loss SmoothL1Loss IoULoss GIoULoss DIoULoss CIoULoss
"""
INITIALIZERS = """
    Constant Xavier Normal TruncNormal Uniform Kaiming Caffe2Xavier Pretrained
"""
# Packages of routers, gates, experts and losses.
PARTS_OF_LAYERS = ("damex.moe.", "damex.papers.")
# For each registry, slots (keys at which a type or a dict with a type stands) and the
# types allowed there. Classes of damex are allowed in all slots of their registry.
_TYPES = {
    "MODELS": f"""
        model: DETR DeformableDETR ConditionalDETR DABDETR DINO DDQDETR;
        data_preprocessor: DetDataPreprocessor;
        batch_augments: BatchFixedSizePad BatchSyncRandomResize;
        backbone: ResNet ResNetV1d ResNeXt Res2Net RegNet SwinTransformer MobileNetV2
            EfficientNet PyramidVisionTransformer PyramidVisionTransformerV2;
        neck: ChannelMapper FPN;
        bbox_head: DETRHead DeformableDETRHead ConditionalDETRHead DABDETRHead DINOHead
            DDQDETRHead;
        loss_cls loss_bbox loss_iou: {LOSSES};
        norm_cfg post_norm_cfg: BN BN2d SyncBN GN LN;
        conv_cfg: Conv2d;
        act_cfg: ReLU LeakyReLU PReLU GELU SiLU Swish Sigmoid;
        dropout_layer: Dropout DropPath;
        router gate experts shared_expert losses balance capacity embedding: ;
        ema_type: ExponentialMovingAverage ExpMomentumEMA StochasticWeightAverage
    """,
    "WEIGHT_INITIALIZERS": f"init_cfg override: {INITIALIZERS}",
    "TASK_UTILS": """
        assigner: HungarianAssigner TopkHungarianAssigner;
        match_costs: BBoxL1Cost FocalLossCost ClassificationCost IoUCost;
        iou_calculator: BboxOverlaps2D
    """,
    "TRANSFORMS": """
        pipeline transforms: LoadImageFromFile LoadAnnotations LoadEmptyAnnotations
            FilterAnnotations PackDetInputs Resize FixShapeResize FixScaleResize
            RandomChoiceResize Pad Normalize RandomFlip RandomCrop RandomShift
            RandomAffine RandomErasing Expand CutOut MinIoURandomCrop
            PhotoMetricDistortion YOLOXHSVRandomAug ResizeShortestEdge CachedMosaic
            CachedMixUp Compose RandomChoice RandomApply
    """,
    "DATASETS": """
        dataset datasets train val test: CocoDataset VOCDataset ConcatDataset
            RepeatDataset ClassBalancedDataset
    """,
    "DATA_SAMPLERS": """
        sampler: DefaultSampler InfiniteSampler;
        batch_sampler: AspectRatioBatchSampler
    """,
    "RUNNERS": "runner_type: ",
    "LOOPS": """
        train_cfg: EpochBasedTrainLoop IterBasedTrainLoop;
        val_cfg: ValLoop;
        test_cfg: TestLoop
    """,
    "METRICS": "val_evaluator test_evaluator: ",
    "OPTIM_WRAPPERS": "optim_wrapper: OptimWrapper AmpOptimWrapper",
    "OPTIM_WRAPPER_CONSTRUCTORS": """
        constructor: DefaultOptimWrapperConstructor
            LearningRateDecayOptimizerConstructor
    """,
    "OPTIMIZERS": "optimizer: AdamW Adam SGD",
    "PARAM_SCHEDULERS": """
        param_scheduler: ConstantLR CosineAnnealingLR CosineRestartLR ExponentialLR
            LinearLR MultiStepLR OneCycleLR PolyLR ReduceOnPlateauLR StepLR
    """,
    "HOOKS": """
        custom_hooks: IterTimerHook LoggerHook ParamSchedulerHook CheckpointHook
            DistSamplerSeedHook DetVisualizationHook EMAHook EarlyStoppingHook
            SyncBuffersHook EmptyCacheHook NumClassCheckHook
    """,
    "VISUALIZERS": "visualizer: DetLocalVisualizer",
    "VISBACKENDS": "vis_backends: LocalVisBackend TensorboardVisBackend",
    "LOG_PROCESSORS": "log_processor: LogProcessor",
    # Functions that mmcv and mmengine look up themselves.
    "": """
        nms dqs_cfg: nms soft_nms;
        collate_fn: pseudo_collate default_collate
    """,
}
# Types, or slots of dicts without a type, and their arguments that may be texts. The
# whole config is in no slot, "".
_TEXTS = f"""
    : label_space log_level experiment_name data_check console sync_bn;
    mixture datasets: name group root format data_root train val test img classes;
    MixtureDataset: split on_bad_box label_space;
    CocoDataset VOCDataset: ann_file data_root data_prefix metainfo;
    ConcatDataset: ignore_keys;
    TimmBackbone: name act_layer norm_layer;
    ResNet ResNetV1d ResNeXt Res2Net: style;
    RegNet EfficientNet: arch style;
    ChannelMapper: bias;
    FPN: add_extra_convs;
    upsample_cfg: mode;
    decoder: query_scale_type;
    config: model_type activation_function encoder_activation_function
        decoder_activation_function decoder_method encoder_fuse_op encoder_type;
    backbone_config: model_type layer_type hidden_act out_features backbone;
    {LOSSES}: reduction mode;
    BBoxL1Cost: box_format;
    IoUCost: iou_mode;
    label_prior: source;
    {INITIALIZERS}: layer name mode nonlinearity distribution prefix;
    LoadImageFromFile: color_type imdecode_backend;
    LoadAnnotations: box_type imdecode_backend;
    PackDetInputs: meta_keys;
    Resize FixShapeResize FixScaleResize ResizeShortestEdge: interpolation backend;
    Pad: padding_mode;
    RandomFlip: direction;
    RandomCrop: crop_type;
    MixtureSampler: sampling;
    AmpOptimWrapper: dtype loss_scale;
    ReduceOnPlateauLR: monitor rule threshold_rule;
    OneCycleLR: anneal_strategy;
    CheckpointHook: save_best rule;
    EarlyStoppingHook: monitor rule;
    MixtureMetric: backend;
    DetLocalVisualizer: name;
    dist_cfg: backend;
    mp_cfg: mp_start_method
"""


def _rows(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    """The words before and behind the colons of a table, one row for each before."""
    for row in text.split(";"):
        owners, _, names = row.partition(":")
        for owner in owners.split() or [""]:
            yield owner, frozenset(names.split())


TYPES: Mapping[str, tuple[str, frozenset[str]]] = MappingProxyType(
    {
        slot: (registry, names)
        for registry, text in _TYPES.items()
        for slot, names in _rows(text)
    }
)
"""Registry and allowed types of each slot."""
TEXTS: Mapping[str, frozenset[str]] = MappingProxyType(dict(_rows(_TEXTS)))
"""Arguments that may be texts, by type, or by slot of a dict without a type."""

LOOKED_UP = ("constructor", "runner_type", "ema_type")  # their text is a type
SAME_SLOT = MappingProxyType({"default_hooks": "custom_hooks"})  # a dict of hooks
MOE = "moe"  # read by damex, which takes a text as a choice
# Names of classes, of parameters and of folders: nothing in them is built.
DATA = ("label_space", "rename", "img", "data_prefix", "metainfo", "custom_keys")
_OF_TIMM = """
    type name out_indices pretrained frozen_stages norm_eval channels_last
    drop_rate drop_path_rate drop_block_rate attn_drop_rate proj_drop_rate
    patch_drop_rate in_chans img_size patch_size window_size output_stride
    act_layer norm_layer conv_bias ls_init_value layer_scale_init_value
"""
OF_TIMM = frozenset(_OF_TIMM.split())
"""Options of a TimmBackbone; others lead to files and addresses."""

# Tables of mmengine, not addresses.
PUBLISHED = re.compile(r"(torchvision|open-mmlab)://[\w/.-]+")


def check_parts(parts: Mapping[str, Any], *, where: str) -> None:
    """Reject keys of a config that would build or reach anything not allowed.

    ``where`` is the origin of the config, for error messages. DataError if a type or a
    text is not in the allow-list.
    """
    for key, part in parts.items():
        for place, value, slot in _refused(part, str(key), "", _place("", key)):
            kind = f"types of the slot {slot}" if slot is not None else "arguments"
            raise DataError(
                f"the config in {where} has {place}={value!r:.80}, which is not among "
                f"the {kind} that damex accepts from a checkpoint, and was not used: "
                "it could run code, or reach files and addresses. If you trust whoever "
                "made the checkpoint, add --trust (in Python: trust=True)."
            )


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
        if _names_weights(value.get("checkpoint"), keep_published):
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


# Place, value, and the slot if the value is a type.
Refused = Iterator[tuple[str, Any, str | None]]


def _refused(value: Any, key: str, owner: str | None, place: str) -> Refused:
    """Find the first part of the value of ``key`` that is not allowed.

    ``owner`` is the type (or the slot) of the dict with this key: "" for the whole
    config, None for names and folders (`DATA`).
    """
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _refused(item, key, owner, f"{place}[{number}]")
    elif isinstance(value, dict) and (key in DATA or owner is None):
        for name, item in value.items():
            yield from _refused_text(str(name), key, None, place)
            yield from _refused(item, key, None, _place(place, name))
    elif isinstance(value, dict):
        yield from _refused_inside(value, key, owner, place)
    elif key in LOOKED_UP and value is not None:
        yield from _refused_type(value, key, place)
    elif isinstance(value, str):
        yield from _refused_text(value, key, owner, place)
    elif not isinstance(value, int | float | None):
        yield place, value, None


def _refused_inside(
    part: Mapping[str, Any], key: str, owner: str | None, place: str
) -> Refused:
    inside = MOE if owner == MOE else key  # damex knows all keys below moe
    if "type" in part:
        slot, inside = SAME_SLOT.get(owner or "", key), part["type"]
        yield from _refused_type(inside, slot, f"{place}.type")
    for name, item in part.items():
        here = _place(place, name)
        if inside == "TimmBackbone" and name not in OF_TIMM:
            yield here, item, None
        if name != "type":
            yield from _refused(item, str(name), inside, here)


def _refused_type(kind: Any, slot: str, place: str) -> Refused:
    registry, allowed = TYPES.get(slot, ("", frozenset[str]()))
    if not isinstance(kind, str) or kind not in {*allowed, *_of_damex(registry)}:
        yield place, kind, slot


def _refused_text(text: str, key: str, owner: str | None, place: str) -> Refused:
    if key == "checkpoint" and PUBLISHED.fullmatch(text):
        return
    if key == "default_scope" and text in ("mmdet", "mmengine"):
        return
    is_allowed = (
        owner in (None, MOE)
        or key in TEXTS.get(owner or "", ())
        or owner in _of_damex("MODELS", PARTS_OF_LAYERS)  # take choices only
    )
    if not is_allowed or printable(text) != text or "://" in text:
        yield place, text, None


def _of_damex(
    registry: str, packages: tuple[str, ...] = ("damex.",)
) -> Collection[str]:
    """Names of the classes of damex in a registry of mmdet or mmengine."""
    found = getattr(mmdet.registry, registry, None)
    names: set[str] = set()
    while isinstance(found, Registry):
        known = found.module_dict.items()
        names |= {name for name, one in known if one.__module__.startswith(packages)}
        found = found.parent
    return names


def _place(place: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{place}.{key}" if place else key
    return f"{place}[{key!r:.80}]"


def read_literals(text: str, *, where: str) -> dict[str, Any]:
    """Read the assignments of a config dumped by mmengine: literals and ``dict(...)``.

    Checkpoints can be untrusted, and mmengine would execute their config. ``where`` is
    the origin of the text, for error messages. DataError if the text contains anything
    else.
    """
    found, line = {}, 0
    try:
        for statement in ast.parse(text).body:
            line = statement.lineno
            match statement:
                case ast.Assign(targets=[ast.Name(id=key)]) if key not in RESERVED_KEYS:
                    found[key] = ast.literal_eval(_Literal().visit(statement.value))
                case _:
                    raise ValueError(type(statement).__name__)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        problem = f"cannot be read ({type(error).__name__})."
        if line:
            problem = (
                f"is more than values, and was not read: line {line}. It could run "
                "code; damex writes none of this kind."
            )
        raise DataError(f"the config in {where} {problem}") from error
    return found


class _Literal(ast.NodeTransformer):
    """Make ``dict(key=value)``, ``dict({...})``, ``inf`` and ``nan`` literals."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict"
        if not is_dict or not all(keyword.arg for keyword in node.keywords):
            return node
        keys: list[ast.expr | None] = []
        values: list[ast.expr] = []
        for one in node.args:
            if not isinstance(one, ast.Dict):
                return node
            keys += one.keys
            values += one.values
        keys += [ast.Constant(keyword.arg) for keyword in node.keywords]
        values += [keyword.value for keyword in node.keywords]
        return ast.copy_location(ast.Dict(keys, values), node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in ("inf", "nan"):
            return ast.copy_location(ast.Constant(float(node.id)), node)
        return node

    def visit_Set(self, node: ast.Set) -> ast.AST:
        raise ValueError("set")  # which mmengine does not write
