"""Runs of damex in subprocesses, several at a time, skipping finished ones."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from rich.console import Console

from damex.config_files import read_config
from damex.errors import ConfigError
from damex.workbench.cli.train import use_amp


def check_finished(failed: Sequence[Run]) -> None:
    """Raise ConfigError with the failed runs, if any, after results are written."""
    if failed:
        raise ConfigError(
            f"{len(failed)} runs failed and are missing in the table; see "
            + ", ".join(str(run.log) for run in failed)
        )


def write_config(cfg: Config, folder: Path) -> Path:
    """Write the complete config of some runs to ``config.py`` in their folder.

    ConfigError if the folder has runs (``seedN``, ``timedN``) of another config.
    """
    path = folder / "config.py"
    has_runs = any(folder.glob("seed*")) or any(folder.glob("timed*"))
    if path.is_file():
        old, new = read_config(str(path)).to_dict(), cfg.to_dict()
        changed = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
        if not changed:
            return path
        if has_runs:
            raise ConfigError(
                f"{folder} has runs of a config that differs in {', '.join(changed)}; "
                "name another --work-dir, or delete that folder."
            )
    elif has_runs:
        raise ConfigError(
            f"{folder} has runs, and no config.py that names their config; name "
            "another --work-dir, or delete that folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    cfg.dump(path)
    return path


@dataclass(frozen=True)
class Run:
    """A damex command in a subprocess; finished if it left a summary."""

    config: str
    folder: Path
    options: tuple[str, ...] = ()  # ``key=value`` overrides of the config
    # Whether a training needs an evaluation to count as finished, and can be resumed;
    # others are timed.
    is_scored: bool = False
    command: str = "train"  # or ``test``
    inputs: tuple[str, ...] = ()  # arguments of the command after the config
    images: int = 1  # that it trains on, beside other runs, for the time that is left

    @property
    def log(self) -> Path:
        """The console output of the run."""
        return self.folder / "screen.log"

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of a finished run, else None.

        A truncated file counts as None: the resumed run has nothing to train and writes
        it again. ConfigError if the folder holds a run with other settings, or
        something else.
        """
        prefix = "test_" if self.command == "test" else ""
        path = self.folder / f"{prefix}summary.json"
        if not path.is_file():
            return None
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            return None
        if not isinstance(summary, dict) or not {"command", "datasets"} <= {*summary}:
            raise ConfigError(
                f"{path} is not a summary of a run (command or datasets are missing); "
                "name another --work-dir, or delete that folder."
            )
        command, _, options = summary["command"].partition(" --cfg-options ")
        is_same = {*shlex.split(options)} == {*self.options}
        if not is_same or not {self.config, *self.inputs} <= {*shlex.split(command)}:
            raise ConfigError(
                f"{path} belongs to a run with other settings: {summary['command']}. "
                "Name another --work-dir, or delete that folder."
            )
        return None if self.is_scored and not summary["datasets"] else summary

    def start(self, *, threads: int) -> subprocess.Popen[bytes]:
        """Start the command; a training resumes from its last checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        resumes = self.is_scored and (self.folder / "last_checkpoint").is_file()
        options = ["--cfg-options", *self.options] if self.options else []
        command = [
            *[sys.executable, "-m", "damex", self.command, self.config],
            *[*self.inputs, *["--resume"] * resumes],
            *["--work-dir", str(self.folder), *options],
        ]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env
            )

    def last_line(self) -> str:
        """Return the last non-empty line of the log, for instance its error."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it wrote nothing"


def training_run(config: Path, seed: int, *, images: int = 1) -> Run:
    """Return the run of a written config with a seed, in the folder of the config."""
    folder, options = config.parent / f"seed{seed}", (f"randomness.seed={seed}",)
    return Run(str(config), folder, options, is_scored=True, images=images)


def fit_to_job(cfg: Config, *, amp: bool) -> str:
    """Adapt a training to a single GPU, in place; return a note, or "" for no change.

    The learning rate is scaled from the batch that it is meant for, if the config has
    ``auto_scale_lr.base_batch_size``, to the batch of one process. ConfigError if `amp`
    is set without a GPU.
    """
    if amp:
        use_amp(cfg)
    batch = cfg["train_dataloader"].get("batch_size")
    base = (cfg.get("auto_scale_lr") or {}).get("base_batch_size")
    if get_device() == "cpu" or not base or not batch or base == batch:
        return ""
    cfg["auto_scale_lr"]["enable"] = True
    return f"learning rate x {batch / base:g} (batches of {batch}, not {base})"


def finish(runs: Sequence[Run], console: Console, *, jobs: int) -> list[Run]:
    """Run the unfinished ones, `jobs` at a time, with progress; return failed runs.

    ConfigError if a folder holds a run with other settings.
    """
    open_runs = [run for run in runs if run.summary() is None]
    if not open_runs:
        return []
    threads = max(1, torch.get_num_threads() // jobs)  # respects OMP_NUM_THREADS
    started = time.monotonic()
    console.print(
        f"{len(runs)} runs, {len(runs) - len(open_runs)} finished before; "
        f"{jobs} at a time, {threads} thread{'s' * (threads > 1)} each"
    )
    failed, seen, total = [], 0, sum(run.images for run in open_runs)
    ended = run_all(open_runs, jobs=jobs, threads=threads)
    for done, (run, status) in enumerate(ended, 1):
        seen += run.images
        left = (time.monotonic() - started) / seen * (total - seen)
        summary = run.summary() if status == 0 else None
        if summary is None:
            failed.append(run)
            result = f"FAILED ({run.last_line()})"
        else:
            score = summary.get("mean_ap50")
            other = "no validation object" if summary["datasets"] else "timed"
            result = other if score is None else f"mean AP50 {score:.3f}"
        console.print(
            f"{done}/{len(open_runs)} {run.folder}: {result}; {left / 60:.0f} min left",
            soft_wrap=True,
            highlight=False,
        )
    return failed


POLL_SECONDS = 0.5


def run_all(
    runs: Sequence[Run], *, jobs: int, threads: int
) -> Iterator[tuple[Run, int]]:
    """Start runs in order, `jobs` at a time; yield each with its exit status."""
    waiting = list(runs)
    active: list[tuple[Run, subprocess.Popen[bytes]]] = []
    with _sigterm_unwinds():
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    run = waiting.pop(0)
                    active.append((run, run.start(threads=threads)))
                time.sleep(POLL_SECONDS)
                ended = [pair for pair in active if pair[1].poll() is not None]
                for pair in ended:
                    active.remove(pair)
                    yield pair[0], pair[1].returncode
        finally:
            for _, process in active:
                process.terminate()
            for _, process in active:
                process.wait()


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM unwind the command like Ctrl-C, so that no training is orphaned."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
