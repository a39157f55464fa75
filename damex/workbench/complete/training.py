"""``damex train --data A B --complete``: train, write missing labels, train on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config

from damex.datasets.label_space import LabelSpace
from damex.engine.config import complete_config, label_space_of, load_config
from damex.errors import ConfigError
from damex.files import write_json
from damex.options import option_of
from damex.workbench.api import run_damex
from damex.workbench.check.labels import class_notes
from damex.workbench.zero_config import config_of_folders, named_folders, run_name

# The completed datasets have the classes of the mixture, and folders of their own.
_OF_LABELS = re.compile(r"label_space=|mixture\.\d+\.(?!group\b|weight\b)")


def train_completed(
    *,
    data: Sequence[str],
    model: str | None,
    epochs: int | None,
    device: str | None,
    work_dir: str | None,
    options: Sequence[str],
) -> None:
    """Train for half of the epochs, complete the datasets, and train for the others.

    The first detector lies in ``teacher`` of the work dir, the completed datasets in
    ``completed``; both are kept if the command is repeated. The second training starts
    from the first detector. Each step is a process of its own.

    Args:
        data: Words of ``--data``.
        model: As in ``damex train``, like the following.
        epochs: Of both trainings together.
        device: Of all steps.
        work_dir: Folder of the second training.
        options: Words of ``--cfg-options``.

    Raises:
        ConfigError: If the epochs cannot be split, nothing is missing, or the work dir
            was begun with other settings.
    """
    if "RANK" in os.environ:
        raise ConfigError(
            "--complete is for one process; on several GPUs, run damex train, damex "
            "data complete and damex train one by one."
        )
    folders = named_folders(data)
    base = Path(work_dir or f"work_dirs/{run_name(folders)}")
    cfg = load_config(config_of_folders(folders, model or "tiny"), cfg_options=options)
    space, total = _checked(cfg, epochs)
    if not class_notes(space)[1]:
        raise ConfigError(
            "--complete: each dataset annotates all classes of the mixture, so nothing "
            "is missing; leave it out."
        )
    teacher, completed = base / "teacher", base / "completed"
    words = dict(data=folders, model=model, epochs=total, options=[*options])
    _remember(base / "complete.json", words)
    given = [] if device is None else ["--device", device]
    common = [*given, *([] if model is None else ["--model", model])]
    if not (teacher / "summary.json").exists():
        half = ["--epochs", str(total // 2), "--work-dir", str(teacher)]
        settings = ["--cfg-options", *options] if options else []
        _damex("train", "--data", *data, *common, *half, *settings)
    summary = json.loads((teacher / "summary.json").read_text("utf-8"))
    checkpoint = str(teacher / summary["checkpoint"])
    if not completed.exists():
        out = ["--out", str(completed)]
        _damex("data", "complete", checkpoint, "--data", *data, *out, *given)
    done = [f"{name}={completed / name}" for name in folders]
    rest = ["--epochs", str(total - total // 2), "--work-dir", str(base)]
    kept = [word for word in options if not _OF_LABELS.match(word)]
    settings = ["--cfg-options", *kept, option_of("load_from", checkpoint)]
    _damex("train", "--data", *done, *common, *rest, *settings)


def _checked(cfg: Config, epochs: int | None) -> tuple[LabelSpace, int]:
    """Label space and epochs of a training; ConfigError if they cannot be halved."""
    cfg, _ = complete_config(cfg)
    total = epochs or cfg.train_cfg.get("max_epochs")
    if total is None or total < 2:
        raise ConfigError(
            "--complete needs two epochs or more, one for each half; got "
            f"{total or 'a length in iterations'}. Set --epochs."
        )
    space = label_space_of(cfg)
    assert space is not None  # of a config with a mixture
    return space, total


def _remember(file: Path, words: Mapping[str, Any]) -> None:
    """Refuse to go on with what other settings have begun."""
    if file.exists() and json.loads(file.read_text("utf-8")) != words:
        raise ConfigError(
            f"--complete: {file.parent} was begun with other settings (see {file}); "
            "remove it, or choose another --work-dir."
        )
    write_json(file, words, indent=1)


def _damex(*words: str) -> None:
    run_damex(words, verbose=True)
