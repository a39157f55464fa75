"""``damex train --data A B --complete``: train, write missing labels, train on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from damex.errors import ConfigError
from damex.workbench.api import run_command
from damex.workbench.zero_config import config_of_folders, named_folders, run_name


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
        ConfigError: If the epochs cannot be split, or nothing is missing.
    """
    if "RANK" in os.environ:
        raise ConfigError(
            "--complete is for one process; on several GPUs, run damex train, damex "
            "data complete and damex train one by one."
        )
    folders = named_folders(data)
    base = Path(work_dir or f"work_dirs/{run_name(folders)}")
    total = epochs or config_of_folders(folders, model or "tiny").max_epochs
    if total < 2:
        raise ConfigError(
            f"--complete needs two epochs or more, one for each half; got {total}."
        )
    teacher, completed = base / "teacher", base / "completed"
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
    done = [str(completed / name) for name in folders]
    rest = ["--epochs", str(total - total // 2), "--work-dir", str(base)]
    settings = ["--cfg-options", *options, f"load_from={checkpoint}"]
    _damex("train", "--data", *done, *common, *rest, *settings)


def _damex(*words: str) -> None:
    run_command([sys.executable, "-m", "damex", *words], verbose=True)
