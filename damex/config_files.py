"""Config files: finding by path or name, reading, overriding and writing."""

from __future__ import annotations

import copy
import keyword
import math
import os
import re
import reprlib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config, ConfigDict
from mmengine.utils import import_modules_from_strings

from damex.errors import ConfigError, did_you_mean
from damex.options import parse_options

# The shipped configs: a folder in a wheel, a link in a checkout.
CONFIGS = (Path(__file__).parent / ".mim" / "configs").resolve()
MOE = "_base_/moe"
SPLITS = ("train", "val", "test")
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")

# Top-level keys read by mmengine's Runner and damex.
KEYS = frozenset(
    {
        *("model", "work_dir", "auto_scale_lr", "optim_wrapper", "param_scheduler"),
        *(f"{split}_dataloader" for split in SPLITS),
        *(f"{split}_cfg" for split in SPLITS),
        *("val_evaluator", "test_evaluator", "default_hooks", "custom_hooks"),
        *("data_preprocessor", "load_from", "resume", "launcher", "env_cfg"),
        *("log_processor", "log_level", "visualizer", "default_scope", "randomness"),
        "experiment_name",
        *("mixture", "label_space", "moe", "console", "max_epochs", "max_iters"),
        *("runner_type", "custom_imports", "vis_backends", "find_unused_parameters"),
        *("model_wrapper_cfg", "sync_bn", "compile", "load_optimizer"),
        *("data_check", "train_only", "image_size", "pipeline_check"),
    }
)
WIDTH = 88  # of lines in a written config


class PlainConfig(Config):
    """Config that is written as plain Python values and reads back equal.

    mmengine does not escape keys (a class ``driver's license`` becomes a syntax error)
    and formats with yapf, which takes minutes for 1,000 classes.
    """

    @classmethod
    def of(cls, cfg: Config | ConfigDict) -> PlainConfig:
        """Return a config that shares the content of another."""
        if not isinstance(cfg, Config):
            return cls(cfg)
        plain = cls.__new__(cls)
        plain.__setstate__(cfg.__getstate__())
        return plain

    @property
    def pretty_text(self) -> str:
        """The config as Python text; ConfigError if a value cannot be written."""
        return "".join(f"{k} = {_literal(v, k)}\n" for k, v in self.to_dict().items())


def find_config(name: str, folder: str = "") -> Path:
    """Find a config file.

    ConfigError if nothing matches.

    Args:
        name: A path, or a config that comes with damex: its bare name, its name with
            the folder, or its path in a checkout (``configs/quickstart.py``).
        folder: Subfolder of ``configs`` to search, for instance ``_base_/moe``.
    """
    if Path(name).is_file():
        return Path(name)
    shipped: dict[str, Path] = {}
    for file in sorted((CONFIGS / folder).rglob("*.py")):
        path = file.relative_to(CONFIGS / folder).with_suffix("")
        if "_base_" not in path.parts:
            shipped |= {path.as_posix(): file, path.name: file}
    key = name.removeprefix("configs/").removesuffix(".py")
    key = key.removeprefix(f"{folder}/")
    if key not in shipped:
        if Path(name).is_dir():
            fix = f"to train on it as a dataset: damex train --data {name}."
            raise ConfigError(f"{name} is a folder, not a config; {fix}")
        names = dict.fromkeys(path.stem for path in shipped.values())
        raise ConfigError(
            f"there is no config file {name!r} (seen from {Path.cwd()}), and none of "
            f"that name comes with damex; {did_you_mean(key, names)}"
        )
    return shipped[key]


def config_of(
    config: str, options: Sequence[str] = (), *, needs_model: bool = True
) -> Config:
    """Read the config of a command line and apply its ``--cfg-options``."""
    cfg = read_config(config, needs_model=needs_model)
    merge_options(cfg, parse_options(options))
    return cfg


def read_config(name: str, *, needs_model: bool = True) -> Config:
    """Read a complete config by path or name.

    With `needs_model`, its ``custom_imports`` are imported. ConfigError if it cannot be
    found or read, or lacks a needed model.
    """
    cfg = read_part(name)
    if needs_model:
        if "model" not in cfg:
            raise ConfigError(f"the config {name} of a detector has to set model.")
        import_modules(cfg)
    return cfg


def work_dir_of(cfg: Config, *, resumes: bool) -> str:
    """Return the folder that a training with a config writes to by default.

    A config in a work directory that was copied or moved names the original one, but a
    training is resumed where its checkpoints are.
    """
    file = Path(cfg.filename)
    if resumes and file.is_file() and (file.parent / "last_checkpoint").is_file():
        return str(file.parent)
    return cfg.get("work_dir") or f"work_dirs/{file.stem}"


def import_modules(cfg: Mapping[str, Any]) -> None:
    """Import ``custom_imports``: all of mmdet for damex's configs.

    ConfigError if a module is not found, or the field is not such a dict.
    """
    wanted = cfg.get("custom_imports")
    if not wanted:
        return
    try:
        import_modules_from_strings(**wanted)
    except TypeError as error:
        raise ConfigError(
            "custom_imports must be dict(imports=['my_module']), got "
            f"{reprlib.repr(wanted)}: {str(error).rstrip('.')}."
        ) from error
    except ImportError as error:
        reason = " ".join(str(error.__context__ or error).split())
        raise ConfigError(
            f"custom_imports: {reason}. Python looks for modules in the installed "
            "packages and in the folders of PYTHONPATH: start with "
            "PYTHONPATH=FOLDER_OF_THE_MODULE damex train ..."
        ) from error


def read_part(name: str, folder: str = "") -> Config:
    """Read a partial config file; arguments as in :func:`find_config`."""
    file = find_config(name, folder)
    try:
        return PlainConfig.of(Config.fromfile(file, import_custom_modules=False))
    except Exception as error:  # a config is a program; any error is possible
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the config {file} cannot be read: {type(error).__name__}: {reason}"
        ) from error


def moe_of_file(name: str) -> Any:
    """Return ``moe`` of a file, given by path or by its name in ``_base_/moe``.

    ConfigError if the file is missing, or sets no ``moe``.
    """
    content = read_part(name, MOE)
    if "moe" not in content:
        raise ConfigError(f"moe: the file {content.filename} sets no moe=dict(...).")
    return content["moe"]


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Override settings of a config in place; nested names have dots.

    If ``moe`` names a file, it is read first, so that ``moe.gate.k=2`` changes its
    content. ``moe.gate.k`` and ``model.moe.gate.k`` are the same: a config file has
    ``moe`` at the top level, the config of a work directory has it in the model. As in
    a config file, a dict changes the fields that it names, and ``_delete_=True`` in it
    removes the others. ConfigError if nothing reads an option, a file does not exist or
    sets no ``moe``, or a part of ``moe`` is set for a dense detector.
    """
    options = _at_place_of_moe(cfg, options)
    for name in options:
        _check_name(cfg, name, options[name])
    for key in ("max_epochs", "max_iters"):
        if f"train_cfg.{key}" in options and key not in options:
            cfg.pop(key, None)  # it would take precedence; see set_length
    inner = [name for name in options if name.startswith("moe.")]
    if inner and ("moe" in options or "moe" in cfg):
        moe = options.pop("moe", cfg.get("moe"))
        cfg.moe = moe_of_file(moe) if isinstance(moe, str) else moe
        if cfg.moe is None:
            raise ConfigError(
                f"{inner[0]}={options[inner[0]]!r}: moe is None, a dense detector; add "
                "moe=damex (or another of configs/_base_/moe), or leave it out."
            )
    mixture = copy.deepcopy(cfg.get("mixture"))
    options = {name: _merged(cfg, name, value) for name, value in options.items()}
    try:
        cfg.merge_from_dict(options)
    except TypeError as error:
        raise ConfigError(
            f"--cfg-options {' '.join(options)} set one field as a whole and in part; "
            "keep one of them."
        ) from error
    if any(name.startswith("custom_imports") for name in options):
        import_modules(cfg)  # those of the file were imported with it
    # A written config has the mixture in its dataloaders as well.
    for dataset in mixtures_of(cfg) if mixture is not None else ():
        if dataset.get("datasets") == mixture:  # else evaluation uses a part of it
            dataset["datasets"] = copy.deepcopy(cfg["mixture"])


def _check_name(cfg: Config, name: str, value: Any) -> None:
    """Reject an option that nothing reads, or that was read with the config file."""
    first = name.partition(".")[0]
    if first in KEYS:
        return
    if first in cfg:
        raise ConfigError(
            f"{name}={value!r} changes nothing: {first} is a variable of the config "
            "file; set the fields with its value, such as train_dataloader.dataset."
        )
    raise ConfigError(
        f"{name}={value!r}: the config has no {first}, and nothing reads it; "
        f"{did_you_mean(first, sorted(KEYS))}"
    )


def _at_place_of_moe(cfg: Config, options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename options of ``moe`` to where the config has it."""
    is_inside = "moe" not in {*cfg, *options} and "moe" in (cfg.get("model") or {})
    place = "model.moe." if is_inside else "moe."
    return {re.sub(r"^(model\.)?moe\.", place, key): v for key, v in options.items()}


def _merged(cfg: Any, name: str, value: Any) -> Any:
    """The value of an option as mmengine merges it.

    An option below a value without fields, or beyond the end of a list, is rejected.
    """
    parts = name.split(".")
    for count, part in enumerate(parts):
        is_list = isinstance(cfg, list)
        is_field = not count or isinstance(cfg, Mapping)
        if is_list:
            is_field = (
                part.isdigit() and int(part) < len(cfg) and count < len(parts) - 1
            )
        if not is_field:
            above = ".".join(parts[:count])
            raise ConfigError(
                f"{name}: {above} is {reprlib.repr(cfg)} in the config, and {part} of "
                f"it cannot be set; set {above} as a whole, or a field of an item of a "
                f"list, as in {above}.0.type=..."
            )
        if not is_list and part not in cfg:
            return value
        cfg = cfg[int(part) if is_list else part]
    if isinstance(value, Mapping) and not isinstance(cfg, Mapping):
        return {**value, "_delete_": True}  # a dict in place of something else
    return value


def mixtures_of(cfg: Mapping[str, Any]) -> list[dict]:
    """Return the MixtureDataset configs of all dataloaders."""
    loaders = [cfg.get(loader) or {} for loader in LOADERS]
    return [one for x in loaders for one in mixture_datasets(x.get("dataset"))]


def mixture_datasets(dataset: Any) -> list[dict]:
    """Return the MixtureDataset configs in a dataset config, looking into wrappers.

    ConfigError if a wrapper mixes images of several datasets.
    """
    if not isinstance(dataset, dict):
        return []
    if dataset.get("type") == "MixtureDataset":
        return [dataset]
    mixtures = mixture_datasets(dataset.get("dataset"))
    if mixtures and "pipeline" in dataset:
        raise ConfigError(
            f"{dataset['type']} around a MixtureDataset would make images of several "
            "datasets, which belong to none; remove it, and put CachedMosaic or "
            "CachedMixUp into the mixture's pipeline: they mix images of one dataset."
        )
    return mixtures


def _literal(value: Any, where: str) -> str:
    """Python text of a value: one line, or a line per item if that is too long."""
    if isinstance(value, Mapping):
        is_call = all(map(_is_word, value))
        first, last = ("dict(", ")") if is_call else ("{", "}")
        parts = [
            (f"{key}=" if is_call else f"{_literal(key, where)}: ")
            + _literal(item, f"{where}.{key}")
            for key, item in value.items()
        ]
    elif isinstance(value, (list, tuple)):
        first, last = "[]" if isinstance(value, list) else "()"
        parts = [_literal(item, f"{where}[{i}]") for i, item in enumerate(value)]
    else:
        return _scalar(value, where)
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    line = f"{first}{', '.join(parts)}{comma}{last}"
    if "\n" not in line and len(line) <= WIDTH:
        return line
    lines = textwrap.indent(",\n".join(parts), "    ")
    return f"{first}\n{lines},\n{last}"


def _is_word(key: Any) -> bool:
    """Whether a key can be written as a keyword argument unchanged."""
    is_name = isinstance(key, str) and key.isascii() and key.isidentifier()
    return is_name and not keyword.iskeyword(key) and key != "__debug__"


def _scalar(value: Any, where: str) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif isinstance(value, type):
        value = f"{value.__module__}.{value.__qualname__}"  # registries import it
    if value is None:
        return "None"
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(
            f"{where} is NaN, which has no literal; set a number or None."
        )
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0.0 else "-1e999"  # Python has no literal for inf
    for kind in (bool, int, float, str, bytes):
        if isinstance(value, kind):
            # mmengine fills in templates such as {{ fileDirname }} when it reads.
            return kind.__repr__(value).replace("{{", r"{\x7b")
    raise ConfigError(
        f"{where}={value!r} is of type {type(value).__name__}, which cannot be written "
        "to a config file; use numbers, texts, True, False, None, lists, tuples and "
        "dicts."
    )
