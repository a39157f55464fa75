"""The baselines of ``damex headroom``: complete configs that read as many images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmdet.registry import DATA_SAMPLERS, DATASETS, MODELS
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope

import damex.registry  # noqa: F401
from damex.config_files import MOE, mixtures_of, read_part
from damex.datasets.label_space import LabelFile, read_label_space
from damex.datasets.spec import parse_mixture
from damex.engine.config import DATASET_OPTIONS, most_answers, resolve_config
from damex.engine.console import filter_console
from damex.engine.optim import set_length
from damex.errors import ConfigError
from damex.hf.detector import MoETransformersDetector
from damex.models.detectors import MoEDINO
from damex.workbench.cli.commands import BASELINES

RECIPE = "damex_best"
SINGLES = ("single", "single_full")  # baselines of one training per dataset

Change = Callable[[Config], None]
# Scheduler fields that count iterations if `by_epoch` is False.
SPANS = ("begin", "end", "T_max", "step_size", "total_steps", "milestones", "periods")


@dataclass(frozen=True)
class JointTraining:
    """The data of the joint training."""

    config: Config  # the dense detector, its length in ``train_cfg``
    samples_per_epoch: int  # over all datasets
    shares: Mapping[str, float]  # fraction of each dataset in them; sums to 1
    classes: Mapping[str, int]  # number in each dataset


@dataclass(frozen=True)
class Training:
    """One kind of training; `name` is its folder, `images` the number read by a run."""

    name: str
    config: Config
    images: int


def read_joint(cfg: Config) -> JointTraining:
    """Check a config, make a dense copy, and read the dataset shares of its sampler.

    ConfigError if it has no mixture, or cannot be trained and scored by dataset;
    DataError if an annotation file contradicts the config.
    """
    dense = copy.deepcopy(cfg)
    set_length(dense)
    _check(dense)
    dense["moe"] = None
    dense["model"].pop("moe", None)
    dense.pop("work_dir", None)  # set for each run
    init_default_scope("mmdet")
    filter_console(MMLogger.get_instance("headroom"))
    loader = resolve_config(dense)["train_dataloader"]
    default = dict(dataset=DATASETS.build(loader["dataset"]), seed=0)
    sampler = DATA_SAMPLERS.build(loader["sampler"], default_args=default)
    space = sampler.dataset.label_space
    shares = dict(zip(space.dataset_names, map(float, sampler.shares), strict=True))
    labels = zip(space.dataset_names, space.coverage()["labels"], strict=True)
    classes = {name: len(own) for name, own in labels}
    return JointTraining(dense, sampler.total, shares, classes)


def baselines_of(joint: JointTraining, names: Sequence[str]) -> list[Training]:
    """Return the trainings behind names of baselines.

    These are keys of :data:`CHANGES`; ``single`` and ``single_full``, a detector per
    dataset, together or each as long as the joint training; or ``oracle`` (the recipe,
    evaluated with oracle routing). ConfigError if the config cannot be changed so.
    """
    trainings = []
    for name in names:
        if name in SINGLES:
            trainings += _singles(joint, name)
        elif name == "oracle":
            trainings += experts_of(joint, [RECIPE])
        else:
            trainings.append(_changed(joint, name, CHANGES[name]))
    return trainings


def experts_of(joint: JointTraining, files: Sequence[str]) -> list[Training]:
    """Return the trainings with experts that are compared with the baselines.

    ``files`` are names in ``configs/_base_/moe``, or paths. The settings of a file
    override the config, and the training is named by the stem. A file with
    ``arms=dict(NAME=dict(...), ...)`` makes one training per arm: its settings,
    overridden by the arm's. ConfigError if a file is missing, or takes the name of
    another training.
    """
    found: dict[str, Training] = {}
    for file in files:
        base = read_part(file, MOE)
        arms = base.pop("arms", None) or {Path(base.filename).stem: {}}
        for name, arm in arms.items():
            if name in {*CHANGES, "oracle", *found}:
                raise ConfigError(
                    f"--experts names {file!r}, but another training has the name "
                    f"{name!r} and its folder; omit it, or rename it."
                )
            part = copy.deepcopy(base)
            part.merge_from_dict(arm)
            found[name] = _changed(joint, name, partial(_mix, part=part))
    return list(found.values())


def _changed(joint: JointTraining, name: str, change: Change) -> Training:
    cfg = copy.deepcopy(joint.config)
    change(cfg)
    return Training(name, cfg, _images(cfg, joint.samples_per_epoch))


def _multiply(cfg: Config, *, path: str, factor: float) -> None:
    *parents, key = path.split(".")
    inner: Any = cfg
    for parent in parents:
        inner = inner.get(parent) or {}
    value = inner.get(key)
    if not isinstance(value, (int, float)):
        raise ConfigError(
            f"a baseline multiplies {path} by {factor:g}, and it is {value!r} in the "
            "config; set a number, or omit the baseline with --baselines."
        )
    inner[key] = value * factor


def _mix(cfg: Config, *, part: Config) -> None:
    """Apply the settings of a file with experts."""
    settings = part.to_dict()
    cfg["moe"] = settings.pop("moe", None)
    cfg.merge_from_dict(settings)


def _partition(cfg: Config) -> None:
    """Give each dataset separate class logits, trained on its images alone.

    At inference a linear head predicts the dataset if it is not given.
    """
    if not _is_a(cfg, MoEDINO):
        rest = " ".join(name for name in BASELINES if name != "partitioned")
        raise ConfigError(
            "the baseline partitioned needs model.type='MoEDINO', which can guess the "
            f"dataset of an image by a label_prior; it is {cfg['model']['type']!r}. "
            f"Name the others: --baselines {rest}."
        )
    labels = read_label_space(cfg.get("label_space") or "union")
    _forget_labels(cfg)
    cfg["label_space"] = "partitioned"
    if isinstance(labels, LabelFile):
        cfg["label_space"] = labels.partitioned().to_content()
    cfg["model"]["ignore_unannotated_classes"] = True
    cfg["model"]["label_prior"] = dict(source="head")


def _widen(cfg: Config, *, component: str) -> None:
    """Give the FFNs of the encoder or decoder four times the width."""
    path = f"model.{component}.layer_cfg.ffn_cfg.feedforward_channels"
    if _is_a(cfg, MoETransformersDetector):
        path = f"model.config.{component}_ffn_dim"
    _multiply(cfg, path=path, factor=4)


def _is_a(cfg: Config, kind: type) -> bool:
    """Whether the detector of a config is of a class."""
    found = MODELS.get(cfg["model"]["type"])
    return isinstance(found, type) and issubclass(found, kind)


CHANGES: dict[str, Change] = {
    "dense": lambda cfg: None,
    "dense_lr2": partial(_multiply, path="optim_wrapper.optimizer.lr", factor=2.0),
    "partitioned": _partition,
    "wide_decoder": partial(_widen, component="decoder"),
    "wide_encoder": partial(_widen, component="encoder"),
}


def _singles(joint: JointTraining, name: str) -> list[Training]:
    """Dense detectors of single datasets.

    Each reads the images that its dataset has in the mixture; with ``single_full``, as
    many as the joint training reads of all.
    """
    if len(joint.shares) < 2:
        raise ConfigError(
            f"the mixture has one dataset, {next(iter(joint.shares))!r}, for which "
            f"{name} equals dense; remove {name} from --baselines."
        )
    trainings = []
    for dataset, share in joint.shares.items():
        if name == "single_full":
            share = 1.0
        samples = max(1, round(share * joint.samples_per_epoch))
        cfg = copy.deepcopy(joint.config)
        _reduce_data(cfg, dataset)
        most = most_answers(cfg["model"], joint.classes[dataset])
        test = cfg["model"].get("test_cfg") or {}
        if most is not None and test.get("max_per_img", 0) > most:
            test["max_per_img"] = most
        cfg["train_dataloader"]["sampler"]["samples_per_epoch"] = samples
        train = cfg["train_cfg"]
        if "max_iters" in train:
            for key in {"max_iters", "val_interval", "val_begin"} & {*train}:
                train[key] = _scaled(train[key], share)
        cfg["param_scheduler"] = _scaled_spans(cfg.get("param_scheduler"), share)
        trainings.append(Training(f"{name}_{dataset}", cfg, _images(cfg, samples)))
    return trainings


def _reduce_data(cfg: Config, dataset: str) -> None:
    """Reduce all splits to one dataset and its classes."""
    cfg["mixture"] = [entry for entry in cfg["mixture"] if entry["name"] == dataset]
    labels = read_label_space(cfg.get("label_space") or "union")
    if isinstance(labels, LabelFile):
        cfg["label_space"] = labels.only(dataset).to_content()
    _forget_labels(cfg)
    for option in DATASET_OPTIONS:  # meaningless for one dataset
        cfg["model"].pop(option, None)


def _forget_labels(cfg: Config) -> None:
    """Delete what a written config repeats of its datasets and label space."""
    for mixture in mixtures_of(cfg):
        mixture.pop("datasets", None)
        if isinstance(mixture.get("label_space"), Mapping):
            del mixture["label_space"]
    cfg["model"]["bbox_head"]["num_classes"] = None


def _scaled_spans(schedulers: Any, share: float) -> Any:
    """Scale the iterations of schedulers to a training of ``share`` the length.

    A warm-up of fixed length would take up most of a short training.
    """
    if isinstance(schedulers, (list, tuple)):
        return [_scaled_spans(one, share) for one in schedulers]
    if not isinstance(schedulers, Mapping):
        return schedulers
    if "type" not in schedulers:  # one for each of several optimizers
        return {name: _scaled_spans(one, share) for name, one in schedulers.items()}
    if schedulers.get("by_epoch", True):
        return schedulers
    spans = {key: schedulers[key] for key in SPANS if schedulers.get(key) is not None}
    return {**schedulers, **{key: _scaled(v, share) for key, v in spans.items()}}


def _scaled(length: Any, share: float) -> Any:
    """Scale a length, or a list of them; 0 and fractions of the training stay."""
    if isinstance(length, (list, tuple)):
        return [_scaled(one, share) for one in length]
    is_fraction = isinstance(length, float) and length <= 1
    return length if is_fraction or not length else max(1, round(length * share))


def _images(cfg: Config, joint_samples: int) -> int:
    """Return the images that a training reads; an arm may set its own number."""
    train, loader = cfg["train_cfg"], cfg["train_dataloader"]
    if "max_iters" in train:
        return train["max_iters"] * loader["batch_size"]
    own = loader["sampler"].get("samples_per_epoch")
    return train["max_epochs"] * (own or joint_samples)


def _check(cfg: Config) -> None:
    """Reject configs that cannot be trained dense and scored by dataset."""
    if cfg.get("mixture") is None:
        raise ConfigError(
            "the config has no mixture=[dict(name=..., ...), ...], and experts are "
            "about several datasets; see configs/own_datasets.py."
        )
    parse_mixture(cfg["mixture"])
    for key in ("train_dataloader", "val_dataloader", "train_cfg", "val_evaluator"):
        if not cfg.get(key):
            raise ConfigError(f"the config sets no {key}, so that nothing is measured.")
    train, sampler = cfg["train_cfg"], cfg["train_dataloader"].get("sampler") or {}
    evaluators = cfg["val_evaluator"]
    evaluators = [evaluators] if isinstance(evaluators, Mapping) else evaluators
    problem = None
    if "max_epochs" not in train and "max_iters" not in train:
        problem = "train_cfg sets neither max_epochs nor max_iters."
    elif all(one.get("type") != "MixtureMetric" for one in evaluators):
        problem = "val_evaluator has no dict(type='MixtureMetric'): it scores datasets."
    elif sampler.get("type") != "MixtureSampler":
        problem = (
            "train_dataloader.sampler must be dict(type='MixtureSampler'), which knows "
            "the share of each dataset."
        )
    elif "experts" in (cfg.get("optim_wrapper") or {}):
        problem = (
            "optim_wrapper.experts is for detectors with experts, and these are dense; "
            "remove it and optim_wrapper.constructor."
        )
    if problem is not None:
        raise ConfigError(problem)
