"""Validation of a config's settings before anything is built."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from damex.commandline.commands import LAUNCHERS
from damex.engine.config_files import KEYS, LOADERS, mixture_datasets
from damex.engine.optim import check_optimizer_type
from damex.errors import ConfigError
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

DICT = Rule("a dict", is_dict)
# A command line parses 1e4 as a float.
LENGTH = Rule(
    "a whole number of 1 or more",
    lambda v: type(v) in (int, float) and v >= 1 and float(v).is_integer(),
)
POSITIVE = Rule("a number above 0", lambda v: type(v) in (int, float) and v > 0.0)
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

# Settings by name; "*" is any dataloader. None (the default) is allowed unless the name
# is in `NEEDED`.
SETTINGS: Mapping[str, Rule] = MappingProxyType(
    {
        "model": DICT,
        "work_dir": Rule(
            "the name of a folder", lambda v: isinstance(v, str) and v != ""
        ),
        "max_epochs": LENGTH,
        "max_iters": LENGTH,
        "train_cfg": DICT,
        "train_cfg.max_epochs": LENGTH,
        "train_cfg.max_iters": LENGTH,
        "train_cfg.val_interval": LENGTH,
        "train_cfg.val_begin": NON_NEGATIVE,
        "*": DICT,
        "*.batch_size": COUNT,
        "*.num_workers": NUMBER,
        "*.dataset": DICT,
        "train_dataloader.sampler": DICT,
        "train_dataloader.sampler.samples_per_epoch": COUNT,
        "optim_wrapper": DICT,
        "optim_wrapper.optimizer": DICT,
        "optim_wrapper.optimizer.lr": NON_NEGATIVE,
        "optim_wrapper.optimizer.weight_decay": NON_NEGATIVE,
        "optim_wrapper.accumulative_counts": COUNT,
        "optim_wrapper.clip_grad": DICT,
        "optim_wrapper.clip_grad.max_norm": POSITIVE,
        "model.num_queries": COUNT,
        "model.test_cfg": DICT,
        "model.test_cfg.max_per_img": COUNT,
        "model.encoder.num_layers": COUNT,
        "model.decoder.num_layers": COUNT,
        "env_cfg": DICT,
        "randomness": DICT,
        "randomness.seed": NUMBER,
        "default_hooks": DICT,
        "custom_hooks": Rule("a list of dicts", are_dicts),
        "resume": FLAG,
        "load_optimizer": FLAG,
        "launcher": one_of(*LAUNCHERS),
        "log_level": one_of(*LEVELS),
        "console": one_of("progress", "full"),
        "data_check": one_of("quick", "off"),
        "find_unused_parameters": FLAG,
        "compile": Rule("True, False or a dict", lambda v: isinstance(v, bool | dict)),
    }
)
NEEDED = ("model", "env_cfg", "work_dir")
# mmengine needs all or none of each row.
TOGETHER = (
    ("train_dataloader", "train_cfg", "optim_wrapper"),
    ("val_dataloader", "val_cfg", "val_evaluator"),
    ("test_dataloader", "test_cfg", "test_evaluator"),
)
# Pipeline steps, and their options that are image sizes.
STEPS = ("Resize", "Crop", "Pad")
SIZES = ("scale", "scales", "size", "crop_size")


def check_settings(cfg: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first invalid setting, and what is allowed."""
    for name, rule in SETTINGS.items():
        for place in dict.fromkeys(name.replace("*", loader) for loader in LOADERS):
            for value in _values(cfg, place):
                may_be = (value is None and place not in NEEDED) or rule.is_allowed(
                    value
                )
                if not may_be:
                    raise ConfigError(f"{place} must be {rule.words}, got {value!r}.")
    _check_together(cfg)
    optimizer = (cfg.get("optim_wrapper") or {}).get("optimizer")
    if optimizer is not None:
        check_optimizer_type(optimizer, "optimizer")
    for loader in LOADERS:
        _check_dataset(cfg, loader)


def _check_together(cfg: Mapping[str, Any]) -> None:
    """Reject a dataloader without its loop, and the like."""
    for row in TOGETHER:
        missing = [name for name in row if cfg.get(name) is None]
        if missing and len(missing) < len(row):
            there = " and ".join(name for name in row if name not in missing)
            raise ConfigError(
                f"{' and '.join(missing)} must be set, too, with {there}; or set all "
                f"of {', '.join(row)} to None."
            )


def _check_dataset(cfg: Mapping[str, Any], loader: str) -> None:
    """Reject invalid image sizes and a mixture without datasets."""
    dataset = (cfg.get(loader) or {}).get("dataset")
    for step, key, value in _sizes(dataset):
        raise ConfigError(
            f"{step} in a pipeline of {loader}: {key} must be made of numbers above 0, "
            f"as in {key}=(1333, 800), got {value!r}."
        )
    named = cfg.get("mixture") is not None
    if not all(
        named or mixture.get("datasets") for mixture in mixture_datasets(dataset)
    ):
        raise ConfigError(
            f"mixture is None or missing, and {loader} has a MixtureDataset; set "
            "mixture=[dict(name=..., ...), ...], as in configs/own_datasets.py."
        )


def _values(cfg: Any, place: str) -> Iterator[Any]:
    *parts, last = place.split(".")
    for part in parts:
        cfg = cfg.get(part)
        if not is_dict(cfg):
            return
    if last in cfg:
        yield cfg[last]


def _sizes(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield pipeline steps below a config whose image size is invalid."""
    if is_dict(config):
        for key, value in config.items():
            kind = str(config.get("type"))
            is_size = key in SIZES and any(step in kind for step in STEPS)
            if is_size and not _is_positive(value):
                yield kind, key, value
            yield from _sizes(value)
    elif isinstance(config, (list, tuple)):
        for item in config:
            yield from _sizes(item)


def _is_positive(value: Any) -> bool:
    """Whether a value is None, a number above 0, or a non-empty nesting of these."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(map(_is_positive, value))
    return value is None or POSITIVE.is_allowed(value)


def check_answers(model: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``max_per_img`` is too high for a detector's queries."""
    queries, head = model.get("num_queries"), model.get("bbox_head") or {}
    asked = (model.get("test_cfg") or {}).get("max_per_img")
    loss = head.get("loss_cls")
    if queries is None or asked is None or loss is None:
        return
    classes = head.get("num_classes") if loss.get("use_sigmoid") else 1
    if classes is not None and asked > queries * classes:
        raise ConfigError(
            f"model.num_queries={queries} can make {queries * classes} detections per "
            f"image, but model.test_cfg.max_per_img={asked} asks for more; raise "
            f"num_queries, or set model.test_cfg.max_per_img={queries * classes}."
        )


def misspelt_keys(cfg: Mapping[str, Any]) -> list[str]:
    """Return warnings about unknown top-level names that resemble a key."""
    near = {
        key: difflib.get_close_matches(key, KEYS, n=1, cutoff=0.85)
        for key in cfg
        if key not in KEYS
    }
    return [
        f"the config sets {key}, which nothing reads; did you mean {found[0]}?"
        for key, found in near.items()
        if found
    ]
