"""From a config to a runner: options, checks, and values that follow from others."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mmdet.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from mmengine.config import Config, ConfigDict
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from damex.config_files import (
    KEYS,
    LOADERS,
    PlainConfig,
    merge_options,
    mixture_datasets,
    mixtures_of,
    moe_of_file,
    read_config,
    work_dir_of,
)
from damex.datasets.geometry import (
    SIZES,
    check_views,
    choose_tiles,
    padding_notes,
    set_image_size,
    sized_steps,
)
from damex.datasets.label_space import LabelFile, LabelSpace, read_label_space
from damex.datasets.spec import parse_mixture
from damex.engine.optim import check_type, set_length
from damex.errors import ConfigError, did_you_mean
from damex.models.build import module_class
from damex.models.config import (
    COUNT,
    FLAG,
    NON_NEGATIVE,
    NUMBER,
    Rule,
    are_dicts,
    is_dict,
    one_of,
)
from damex.models.dataset_awareness import DatasetAwarenessConfig
from damex.models.detectors import RoutedDetector
from damex.options import parse_options

# Detector options that depend on which dataset annotates which class.
DATASET_OPTIONS = tuple(vars(DatasetAwarenessConfig()))
DICT = Rule("a dict", is_dict)
# A command line parses 1e4 as a float.
LENGTH = Rule(
    "a whole number of 1 or more",
    lambda v: type(v) in (int, float) and v >= 1 and float(v).is_integer(),
)
POSITIVE = Rule("a number above 0", lambda v: type(v) in (int, float) and v > 0.0)
LAUNCHERS = ("none", "pytorch", "slurm", "mpi")
ONE_DATASET = ("CocoMetric", "VOCMetric")  # of mmdet; MixtureMetric is for several
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

# Settings by name; "*" is any dataloader. None (the default) is allowed unless the name
# is in `NEEDED`.
SETTINGS: Mapping[str, Rule] = MappingProxyType(
    {
        "work_dir": Rule("the name of a folder", lambda v: type(v) is str and v != ""),
        "max_epochs": LENGTH,
        "max_iters": LENGTH,
        "train_cfg.max_epochs": LENGTH,
        "train_cfg.max_iters": LENGTH,
        "train_cfg.val_interval": LENGTH,
        "train_cfg.val_begin": NON_NEGATIVE,
        "*.batch_size": COUNT,
        "*.num_workers": NUMBER,
        "train_dataloader.sampler.samples_per_epoch": COUNT,
        "optim_wrapper.optimizer.lr": NON_NEGATIVE,
        "optim_wrapper.optimizer.weight_decay": NON_NEGATIVE,
        "optim_wrapper.accumulative_counts": COUNT,
        "optim_wrapper.clip_grad.max_norm": POSITIVE,
        "model.num_queries": COUNT,
        "model.image_balance": Rule(
            "a number from 0 to 1",
            lambda v: type(v) in (int, float) and 0.0 <= v <= 1.0,
        ),
        "model.test_cfg.max_per_img": COUNT,
        "model.encoder.num_layers": COUNT,
        "model.decoder.num_layers": COUNT,
        "randomness.seed": NUMBER,
        "custom_hooks": Rule("a list of dicts", are_dicts),
        "resume": FLAG,
        "load_optimizer": FLAG,
        "launcher": one_of(*LAUNCHERS),
        "log_level": one_of(*LEVELS),
        "console": one_of("progress", "full"),
        "data_check": one_of("quick", "off"),
        "pipeline_check": one_of("on", "off"),
        "find_unused_parameters": FLAG,
        "compile": Rule("True, False or a dict", lambda v: isinstance(v, bool | dict)),
        **dict.fromkeys(
            (
                *("model", "train_cfg", "*", "*.dataset", "train_dataloader.sampler"),
                *("optim_wrapper", "optim_wrapper.optimizer"),
                *("optim_wrapper.clip_grad", "model.test_cfg", "env_cfg"),
                *("randomness", "default_hooks"),
            ),
            DICT,
        ),
    }
)
NEEDED = ("model", "env_cfg", "work_dir")
# mmengine needs all or none of each row.
TOGETHER = (
    ("train_dataloader", "train_cfg", "optim_wrapper"),
    ("val_dataloader", "val_cfg", "val_evaluator"),
    ("test_dataloader", "test_cfg", "test_evaluator"),
)


def load_config(
    config: str | Config,
    *,
    cfg_options: Sequence[str] = (),
    work_dir: str | None = None,
    launcher: str = "none",
    local_rank: int = 0,  # mmengine reads it from the environment
    resumes: bool = False,
) -> Config:
    """Read the config and apply the command line; ConfigError if unreadable."""
    cfg = read_config(config) if isinstance(config, str) else config
    cfg.work_dir = work_dir_of(cfg, resumes=resumes)
    merge_options(cfg, parse_options([f"launcher={launcher}", *cfg_options]))
    if work_dir is not None:
        cfg.work_dir = work_dir
    return cfg


def build_runner(cfg: Config) -> Runner:
    """Build the runner of the config, MixtureRunner by default.

    mmengine's Runner would silently ignore the keys ``moe`` and ``mixture``.
    """
    cfg.setdefault("runner_type", "MixtureRunner")
    return RUNNERS.build(cfg)


def complete_config(cfg: Config | ConfigDict) -> tuple[PlainConfig, list[str]]:
    """Check a config and fill in what follows from it; with warnings for the log.

    Raises:
        ConfigError: If a setting is invalid, or contradicts another.
        DataError: If an annotation file is missing or is not in COCO format.
    """
    check_settings(cfg)
    notes = misspelt_keys(cfg)
    cfg = PlainConfig.of(copy.deepcopy(cfg))
    notes += [*set_image_size(cfg), *choose_tiles(cfg)]
    cfg = resolve_config(cfg)
    notes += [*check_views(cfg), *padding_notes(cfg)]
    if complete := getattr(check_detector(cfg["model"]), "complete", None):
        complete(cfg)
    check_answers(cfg["model"])
    set_length(cfg)
    for loader in LOADERS:
        if cfg.get(loader) and cfg[loader].get("num_workers") == 0:
            cfg[loader]["persistent_workers"] = False  # torch rejects True
    return cfg, notes


def check_settings(cfg: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first invalid setting, with the allowed values."""
    for name, rule in SETTINGS.items():
        for place in dict.fromkeys(name.replace("*", loader) for loader in LOADERS):
            for value in _values(cfg, place):
                is_default = value is None and place not in NEEDED
                if not is_default and not rule.is_allowed(value):
                    raise ConfigError(f"{place} must be {rule.words}, got {value!r}.")
    for row in TOGETHER:
        missing = [name for name in row if cfg.get(name) is None]
        if missing and len(missing) < len(row):
            raise ConfigError(
                f"{' and '.join(missing)} must be set, too, with "
                f"{' and '.join(name for name in row if name not in missing)}; or set "
                f"all of {', '.join(row)} to None."
            )
    wrapper = cfg.get("optim_wrapper") or {}
    check_type((wrapper.get("optimizer") or {}).get("type"), OPTIMIZERS, "optimizer")
    check_type(wrapper.get("constructor"), OPTIM_WRAPPER_CONSTRUCTORS, "constructor")
    for loader in LOADERS:
        _check_dataset(cfg, loader)


def _check_dataset(cfg: Mapping[str, Any], loader: str) -> None:
    """Reject invalid image sizes and a mixture without datasets."""
    dataset = (cfg.get(loader) or {}).get("dataset")
    for step in sized_steps(dataset):
        for name in SIZES:
            if name in step and not _is_positive(step[name]):
                raise ConfigError(
                    f"{step['type']} in a pipeline of {loader}: {name} must be made of "
                    f"numbers above 0, as in {name}=(1333, 800), got {step[name]!r}."
                )
    mixtures = [] if cfg.get("mixture") is not None else mixture_datasets(dataset)
    if not all(mixture.get("datasets") for mixture in mixtures):
        raise ConfigError(
            f"mixture is None or missing, and {loader} has a MixtureDataset; set "
            "mixture=[dict(name=..., ...), ...], as in configs/own_datasets.py."
        )
    key = loader.replace("dataloader", "evaluator")
    metrics: Any = cfg.get(key) or ()
    for metric in [metrics] if is_dict(metrics) else metrics:
        is_alone = is_dict(metric) and metric.get("type") in ONE_DATASET
        if is_alone and mixture_datasets(dataset):
            raise ConfigError(
                f"{loader} has a MixtureDataset, and the {metric['type']} of {key} "
                f"reads one annotation file; set {key}=dict(_delete_=True, "
                "type='MixtureMetric')."
            )


def _values(cfg: Any, place: str) -> Iterator[Any]:
    *parts, last = place.split(".")
    for part in parts:
        cfg = cfg.get(part)
        if not is_dict(cfg):
            return
    if last in cfg:
        yield cfg[last]


def _is_positive(value: Any) -> bool:
    """Whether a value is None, a number above 0, or a non-empty nesting of these."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(map(_is_positive, value))
    return value is None or POSITIVE.is_allowed(value)


def check_answers(model: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``max_per_img`` is too high for a detector's queries."""
    asked, most = (model.get("test_cfg") or {}).get("max_per_img"), most_answers(model)
    if asked is not None and most is not None and asked > most:
        raise ConfigError(
            f"model.num_queries={model['num_queries']} can make {most} detections per "
            f"image, but model.test_cfg.max_per_img={asked} asks for more; raise "
            f"num_queries, or set model.test_cfg.max_per_img={most}."
        )


def most_answers(model: Mapping[str, Any], classes: int | None = None) -> int | None:
    """Detections per image that ``max_per_img`` can ask for; None if unknown."""
    queries, heads = model.get("num_queries"), [*heads_of(model, "model")]
    head = heads[-1][1] if heads else {}
    classes = classes or head.get("num_classes")
    if (loss := head.get("loss_cls")) is None or queries is None:
        return None
    if not loss.get("use_sigmoid"):  # one detection per query, not per class, too
        return queries
    return None if classes is None else queries * classes


def check_detector(model: Any) -> Any:
    """Return the class of a detector of damex, None for another.

    There ``moe=None`` is dropped; another ``moe`` raises a ConfigError.
    """
    kind = module_class(model)
    if not isinstance(kind, type) or issubclass(kind, RoutedDetector):
        return kind
    if model.pop("moe", None) is None:
        return None
    routed = sorted(
        name
        for name, known in MODELS.module_dict.items()
        if isinstance(known, type) and issubclass(known, RoutedDetector)
    )
    raise ConfigError(
        f"moe is set, but model.type={kind.__name__!r} takes no experts; "
        f"{did_you_mean(f'MoE{kind.__name__}', routed)} Or set moe=None."
    )


def misspelt_keys(cfg: Mapping[str, Any]) -> list[str]:
    """Return warnings about unknown top-level names that resemble a key."""
    return [
        f"the config sets {key}, which nothing reads; did you mean {near}?"
        for key in cfg
        if key not in KEYS
        for near in difflib.get_close_matches(key, KEYS, n=1, cutoff=0.85)
    ]


def resolve_config(cfg: Config | ConfigDict) -> PlainConfig:
    """Fill in datasets, label space, ``num_classes``, ``num_groups`` and ``moe``.

    Pipelines get the top-level ``image_size``, and ``tile="auto"`` becomes a number.
    ``label_coverage`` is filled in if an option of the detector needs it. The top-level
    ``moe`` becomes ``model.moe``; it may name a file of ``configs/_base_/moe``, or the
    path of another file that sets it.

    Every ``MixtureDataset`` without ``datasets`` gets the top-level ``mixture`` list
    and the label space of the whole mixture, so that labels mean the same in training
    and evaluation. If the config already holds a label space, it is kept and no
    annotation file is read: the config of a work dir also works without the training
    files. Without ``mixture`` only ``moe`` is resolved.

    Args:
        cfg: A full config; not changed.

    Returns:
        A resolved copy.

    Raises:
        ConfigError: If the mixture is invalid, or ``num_classes`` contradicts it.
        DataError: If an annotation file is missing or is not in COCO format.
    """
    cfg = PlainConfig.of(copy.deepcopy(cfg))
    model = cfg.get("model")
    if "moe" in cfg:
        if "moe" in model:
            raise ConfigError(
                "both moe and model.moe are set; keep one of them (moe=None at the top "
                "level makes the detector dense)."
            )
        moe = cfg.pop("moe")  # kept in one place, so that a written config reads back
        model["moe"] = moe_of_file(moe) if isinstance(moe, str) else moe
    set_image_size(cfg)
    if cfg.get("mixture") is None:
        return cfg
    choose_tiles(cfg)
    specs = parse_mixture(cfg["mixture"])
    mode = read_label_space(cfg.get("label_space") or "union")
    if isinstance(mode, LabelFile):
        # A written config must not depend on the file.
        cfg["label_space"] = mode.to_content()
    space = label_space_of(cfg)
    if space is None:
        space = LabelSpace.from_specs(specs, mode=mode)
    else:
        space.check(specs, mode=mode)
    for dataset in mixtures_of(cfg):
        dataset.setdefault("datasets", cfg["mixture"])
        dataset["label_space"] = space.to_metainfo()
    _set_num_classes(model, space)
    _set_batch_size(cfg.get("train_dataloader") or {})
    if model.get("moe") is not None:
        model["num_groups"] = len(space.group_names)
    if any(model.get(name) not in (None, False) for name in DATASET_OPTIONS):
        model["label_coverage"] = space.coverage()
    return cfg


def label_space_of(cfg: Config | ConfigDict) -> LabelSpace | None:
    """Return the label space of a resolved config; None without a mixture."""
    for dataset in mixtures_of(cfg):
        if isinstance(dataset.get("label_space"), Mapping):
            return LabelSpace.from_metainfo(dataset["label_space"])
    return None


def _set_batch_size(loader: dict) -> None:
    """Pass the batch size to a sampler of homogeneous batches."""
    sampler = loader.get("sampler") or {}
    if not sampler.get("homogeneous_batches"):
        return
    if loader.get("batch_sampler"):
        raise ConfigError(
            "train_dataloader.sampler.homogeneous_batches=True, but the batch_sampler "
            f"{loader['batch_sampler']['type']} makes other batches; set "
            "train_dataloader.batch_sampler=None, or leave homogeneous_batches out."
        )
    sampler["batch_size"] = loader["batch_size"]


def _set_num_classes(model: dict, space: LabelSpace) -> None:
    """Set the number of classes of the heads; a contradiction is an error."""
    for place, head in heads_of(model, "model"):
        typed = head.get("num_classes")
        if typed is not None and typed != space.num_classes:
            raise ConfigError(
                f"{place}.num_classes is {typed}, but the mixture of "
                f"{', '.join(space.dataset_names)} has {space.num_classes} classes; "
                "leave num_classes out (or None), it follows from the mixture."
            )
        head["num_classes"] = space.num_classes


def heads_of(config: Mapping[str, Any], place: str) -> Iterator[tuple[str, dict]]:
    """The ``bbox_head`` of a detector's config, or of its stages, with its place."""
    for key, value in config.items():
        if key == "bbox_head":
            stages = value if isinstance(value, (list, tuple)) else [value]
            yield from ((f"{place}.{key}", one) for one in stages if is_dict(one))
        elif is_dict(value):
            yield from heads_of(value, f"{place}.{key}")
