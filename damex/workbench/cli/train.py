"""``damex train`` and ``damex test``, with the arguments of mmdet's tools."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmengine.config import Config
from mmengine.device import get_device, utils
from mmengine.fileio import dump, load
from mmengine.runner import Runner
from torch import cuda

import damex.registry  # noqa: F401  (first: it keeps mmdet silent)
from damex.config_files import merge_options, read_part
from damex.datasets.spec import parse_mixture
from damex.datasets.tiles import joined_records
from damex.engine.config import (
    build_runner,
    complete_config,
    label_space_of,
    load_config,
)
from damex.errors import ConfigError, check_known, printable
from damex.files import write_json
from damex.options import option_of
from damex.workbench.api import run_damex
from damex.workbench.check.domains import Pair, has_experts, share_experts
from damex.workbench.check.labels import class_notes
from damex.workbench.zero_config import config_of_folders, named_folders, run_name

# The completed datasets have the classes of the mixture, and folders of their own.
_OF_LABELS = re.compile(r"label_space=|mixture\.\d+\.(?!(group|weight|tile)\b)")


def train(
    config: str | None,
    *,
    data: Sequence[str],
    model: str | None,
    tile: Sequence[str],
    epochs: int | None,
    device: str | None,
    amp: bool,
    auto_scale_lr: bool,
    resume: Sequence[str] | None,
    complete: bool,
    **run: Any,
) -> None:
    """Train as mmdet's ``tools/train.py`` does; options as in ``damex train``."""
    if (config is None) == (not data):
        if resume and resume[0].endswith(".py"):
            raise ConfigError(
                f"--resume takes {resume[0]} for its checkpoint; write: damex train "
                f"{resume[0]} --resume"
            )
        raise ConfigError(
            "train takes either a CONFIG or --data FOLDER..., as in damex train "
            "quickstart. See damex train --help."
        )
    if config is not None and model is not None:
        raise ConfigError("--model belongs to --data: a config sets its own model.")
    if complete:
        rare = amp or auto_scale_lr or resume is not None
        train_completed(data, model, epochs, device, tile=tile, rare=rare, **run)
        return
    use_device(device)
    start = config or config_of_folders(named_folders(data), model or "tiny")
    cfg = load_config(start, resumes=resume is not None, **run)
    alike = share_experts(cfg.mixture) if isinstance(start, Config) else []
    set_tiles(cfg, tile)
    if has_experts(cfg):
        _print_shared(alike)
    if epochs is not None:
        cfg.max_epochs = epochs
    if amp:
        use_amp(cfg)
    if auto_scale_lr:
        _scale_lr(cfg)
    add_data_check(cfg)
    runner = build_runner(cfg)
    if resume is not None:  # of this run alone: the written config has no trace of it
        runner._resume, runner._load_from = True, resume[0] if resume else None
    _print_classes(runner, data)
    runner.train()


def set_tiles(cfg: Config, words: Sequence[str]) -> None:
    """Set ``tile`` of mixture entries by words of ``--tile``, or raise ConfigError."""
    if not words:
        return
    if not cfg.get("mixture"):
        raise ConfigError("--tile is for datasets of a mixture; the config has none.")
    numbers = {spec.name: n for n, spec in enumerate(parse_mixture(cfg.mixture))}
    options = {}
    for word in words:
        name, equals, value = word.rpartition("=")
        if value != "auto" and not value.isdecimal():
            raise ConfigError(
                f"--tile {word}: expected the side of a window in pixels or auto, or "
                f"NAME= and one of these, got {value!r}."
            )
        if equals:
            problem = f"--tile {word}: the mixture has no dataset {name!r}"
            check_known(name, numbers, problem)
        for number in [numbers[name]] if equals else numbers.values():
            tile = value if value == "auto" else int(value)
            options[f"mixture.{number}.tile"] = tile
    merge_options(cfg, options)


def _scale_lr(cfg: Config) -> None:
    """Scale the learning rate by the batch size; ConfigError without a base."""
    if "base_batch_size" not in (cfg.get("auto_scale_lr") or {}):
        raise ConfigError(
            "--auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...) in the "
            "config."
        )
    cfg.auto_scale_lr.enable = True


def _print_shared(pairs: Sequence[Pair]) -> None:
    """Say which datasets share experts as they look alike, on the first process."""
    for first, second, _ in pairs if os.environ.get("RANK", "0") == "0" else ():
        print(
            f"{first} and {second} look alike: they share experts. To keep them "
            "apart: --cfg-options mixture.0.group=NAME mixture.1.group=OTHER ..."
        )


def _print_classes(runner: Runner, data: Sequence[str]) -> None:
    """Say which classes of folders are merged or missing, on the first process."""
    space = label_space_of(runner.cfg)
    if not data or space is None or runner.rank != 0:
        return
    merged, missing = class_notes(space, limit=12)
    lines = [*merged, *missing]
    if lines:
        lines.append(
            f"All classes, and similar names: damex data labels {shlex.join(data)}"
        )
    if missing:
        lines.append(
            "If images show such objects without labels: damex data complete, "
            "docs/guides/classes.md"
        )
    print(printable("\n".join(lines)), end="\n" if lines else "")


def test(
    config: str,
    checkpoint: str,
    *,
    device: str | None,
    classwise: bool,
    out: str | None,
    show: bool,
    show_dir: str | None,
    wait_time: float,
    **run: Any,
) -> None:
    """Evaluate as mmdet's ``tools/test.py`` does; options as in ``damex test``."""
    if out and not out.endswith((".pkl", ".pickle")):
        raise ConfigError(f"--out must end in .pkl or .pickle, got {out!r}.")
    use_device(device)
    cfg = load_config(config, **run)
    cfg.load_from = checkpoint
    if classwise:
        evaluators = cfg.test_evaluator
        for one in evaluators if isinstance(evaluators, list) else [evaluators]:
            if one.get("type") == "MixtureMetric":
                one["classwise"] = True
    if show or show_dir:
        from mmdet.engine.hooks.utils import trigger_visualization_hook

        args = SimpleNamespace(show=show, show_dir=show_dir, wait_time=wait_time)
        cfg = trigger_visualization_hook(cfg, args)
    runner = build_runner(cfg)
    if out:
        from mmdet.evaluation import DumpDetResults

        runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=out))
    runner.test()
    records = load(out) if out and runner.rank == 0 else []
    if any("window" in one for one in records):
        dump(joined_records(records), out)


def add_data_check(cfg: Config) -> None:
    """Add the data check to a config without it; ``data_check='off'`` leaves it out."""
    default, custom = cfg.get("default_hooks") or {}, cfg.get("custom_hooks") or ()
    known = [hook.get("type") for hook in (*default.values(), *custom) if hook]
    if "DataCheckHook" not in known:
        cfg.default_hooks = {**default, "data_check": dict(type="DataCheckHook")}


def use_device(device: str | None) -> None:
    """Choose the device of mmengine, and the GPU; ConfigError if it is missing."""
    kind, _, index = (device or "").partition(":")
    if device is None:
        return
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {device!r}.")
    if kind == "cpu":
        utils.DEVICE = "cpu"
        return
    if int(index or 0) >= cuda.device_count():
        raise ConfigError(
            f"--device {device}: {cuda.device_count()} GPUs are seen here; use cpu, or "
            "another; damex doctor shows which torch is installed."
        )
    cuda.set_device(int(index or 0))


def use_amp(cfg: Config) -> None:
    """Train in mixed precision; ConfigError without a GPU."""
    if get_device() == "cpu":
        raise ConfigError("--amp needs a GPU, and none is seen here; leave it out.")
    cfg.optim_wrapper.type = "AmpOptimWrapper"
    # As wide as float32, so without loss scaling; emulated it would be slow.
    if cuda.is_bf16_supported(including_emulation=False):
        cfg.optim_wrapper.setdefault("dtype", "bfloat16")
    is_half = cfg.optim_wrapper.get("dtype") != "bfloat16"
    cfg.optim_wrapper.setdefault("loss_scale", "dynamic" if is_half else 1.0)


def train_completed(
    data: Sequence[str],
    model: str | None,
    epochs: int | None,
    device: str | None,
    *,
    tile: Sequence[str] = (),
    work_dir: str | None,
    cfg_options: Sequence[str],
    launcher: str = "none",
    local_rank: int = 0,
    rare: bool = False,
) -> None:
    """Train for half of the epochs, complete the datasets, and train for the others.

    The first detector lies in ``teacher`` of the work dir, the completed datasets in
    ``completed``; each step is a process of its own. Repeated, the command keeps what
    is finished, and resumes an interrupted training. ``rare`` is whether other options
    are set. ConfigError if they are, the epochs cannot be split, nothing is missing, or
    the work dir was begun with other settings.
    """
    if not data or rare or launcher != "none" or "RANK" in os.environ:
        raise ConfigError(
            "--complete takes --data FOLDER FOLDER and, of the other options, --model, "
            "--tile, --epochs, --device, --work-dir and --cfg-options; if it is "
            "interrupted, run it again to continue. For a config or several "
            "GPUs, run damex train, damex data complete and damex train one by one."
        )
    folders = named_folders(data)
    start = config_of_folders(folders, model or "tiny")
    cfg = load_config(start, work_dir=work_dir, cfg_options=cfg_options)
    set_tiles(cfg, tile)
    total = _checked(cfg, epochs)
    base = Path(cfg.work_dir)
    teacher, completed = base / "teacher", base / "completed"
    words = dict(data=folders, model=model, epochs=total, tile=[*tile])
    words |= dict(options=[*cfg_options])
    _remember(base / "complete.json", words)
    given = [] if device is None else ["--device", device]
    common = [*given, *([] if model is None else ["--model", model])]
    if not (teacher / "summary.json").exists():
        half = [*common, "--epochs", str(total // 2)]
        half += ["--tile", *tile] if tile else []
        _train_or_resume(teacher, data, half, cfg_options)
    summary = json.loads((teacher / "summary.json").read_text("utf-8"))
    checkpoint = str(teacher / summary["checkpoint"])
    if not completed.exists():
        out = ["--out", str(completed)]
        _run(["data", "complete", checkpoint, *out, *given])
    done = [str(completed / name) for name in folders]
    rest = [*common, "--epochs", str(total - total // 2)]
    kept = [word for word in cfg_options if not _OF_LABELS.match(word)]
    for n, one in enumerate(read_part(str(teacher / summary["config"])).mixture):
        # What the teacher chose by its images: completed ones might decide otherwise.
        kept.append(option_of(f"mixture.{n}.group", one.get("group") or one["name"]))
        if one.get("tile") is not None:
            kept.append(option_of(f"mixture.{n}.tile", one["tile"]))
    kept.append(option_of("load_from", checkpoint))
    _train_or_resume(base, done, rest, kept)


def _train_or_resume(
    folder: Path, data: Sequence[str], words: Sequence[str], options: Sequence[str]
) -> None:
    """Train in a folder; resume a training on this data, newer than its labels."""
    last, labels = folder / "last_checkpoint", folder.glob("completed/*/train.json")
    newest = max((one.stat().st_mtime for one in labels), default=0.0)
    resumes = last.exists() and last.stat().st_mtime > newest
    if resumes and newest:  # unless another training wrote into the same folder
        config = folder / f"{run_name(named_folders(data))}.py"
        begun = read_part(str(config)).mixture if config.exists() else [{}]
        parents = {Path(one.get("root") or "").parent.name for one in begun}
        resumes = parents == {"completed"}
    settings = ["--cfg-options", *options] if options else []
    words = ["train", "--data", *data, *words, "--work-dir", str(folder)]
    _run([*words, *["--resume"] * resumes, *settings])


def _run(words: Sequence[str]) -> None:
    """Run a step, which tells of its own continuation on Ctrl-C."""
    try:
        run_damex(words, verbose=True)
    except KeyboardInterrupt as error:
        said = "interrupted; to continue, run the same command again"
        raise KeyboardInterrupt(said) from error


def _checked(cfg: Config, epochs: int | None) -> int:
    """The number of epochs; ConfigError if nothing is missing or to halve."""
    cfg, _ = complete_config(cfg)
    total = epochs or cfg.train_cfg.get("max_epochs")
    if (cfg.get("default_hooks") or {}).get("checkpoint", {}) is None:
        raise ConfigError(
            "--complete goes on from checkpoints: leave out "
            "default_hooks.checkpoint=None."
        )
    if total is None or total < 2:
        raise ConfigError(
            "--complete needs two epochs or more, one for each half; got "
            f"{total or 'a length in iterations'}. Set --epochs."
        )
    space = label_space_of(cfg)
    assert space is not None  # of a config with a mixture
    if not class_notes(space)[1]:
        raise ConfigError(
            "--complete: each dataset annotates all classes of the mixture that are "
            "not kept apart, so nothing is missing; leave it out."
        )
    return total


def _remember(file: Path, words: Mapping[str, Any]) -> None:
    """Refuse to go on with what other settings have begun."""
    if file.exists() and json.loads(file.read_text("utf-8")) != words:
        raise ConfigError(
            f"--complete: {file.parent} was begun with other settings (see {file}); "
            "remove it, or choose another --work-dir."
        )
    write_json(file, words, indent=1)
