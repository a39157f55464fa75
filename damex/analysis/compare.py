"""The command behind ``tools/compare_moe.py``: one config, several mixtures of experts.

Every run is a training of its own in ``WORK_DIR/NAME/seedN``. What has finished is not
run again, so a killed comparison goes on where it was, and more seeds or mixtures can
be added later.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from damex.analysis.comparison import comparison_row, draw_comparison, markdown_table
from damex.engine.cli import Parser, at_least
from damex.engine.config_files import CONFIGS, MOE, find_config
from damex.errors import ConfigError, DataError

# Not compared by default: they go on from the checkpoint of another training.
SECOND_STAGES = ("deepmoe_stage2",)


def compare_moe(arguments: Sequence[str]) -> None:
    """Train, measure and write the table.

    Args:
        arguments: Command line without the program's name.

    Raises:
        ConfigError: If a name is unknown, a number is out of range, or a run failed.
    """
    args = _parse(arguments)
    console = Console()
    mixtures = _mixtures(args.moe)
    seeds = [(f"seed{seed}", f"randomness.seed={seed}") for seed in args.seeds]
    # Seed by seed, so that a comparison that is cut short has something of each.
    scored = [_row_of_runs(args, mixtures, *seed) for seed in seeds]
    failed = _finish(scored, console, jobs=args.jobs)
    # One short epoch, without the evaluation. Round by round and one at a time: a busy
    # moment hits all mixtures alike.
    samples = f"train_dataloader.sampler.samples_per_epoch={args.timed_samples}"
    short = ("max_epochs=1", "train_cfg.val_begin=9", samples)
    numbers = range(args.timed_rounds)
    timed = [_row_of_runs(args, mixtures, f"timed{n}", *short) for n in numbers]
    failed += _finish(timed, console, jobs=1)
    rows = [
        comparison_row(name, _summaries(scored, name), _summaries(timed, name))
        for name in mixtures
    ]
    _write(Path(args.work_dir), rows, console)
    if failed:
        raise ConfigError(
            f"{len(failed)} runs failed and are missing in the table; see "
            + ", ".join(str(run.log) for run in failed)
        )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        description="Train one config with several mixtures of experts and seeds"
    )
    add = parser.add_argument
    add("config", help="a file, or the name of a config of damex")
    add(
        "--moe",
        nargs="+",
        help="names of files in configs/_base_/moe, or paths; the first row is what "
        "times are compared with (default: dense, then all others)",
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--work-dir", default="work_dirs/compare_moe")
    add(
        "--jobs",
        type=at_least(1),
        default=1,
        help="trainings at a time; they share the cores",
    )
    add(
        "--timed-rounds",
        type=at_least(0),
        default=3,
        help="short runs of each mixture that measure time and memory; 0 for none",
    )
    add("--timed-samples", type=at_least(1), default=320, help="samples in a timed run")
    add("--cfg-options", nargs="+", default=[], help="overrides for all: key=value")
    args = parser.parse_args(arguments)
    find_config(args.config)
    if len(set(args.seeds)) < len(args.seeds):
        raise ConfigError(f"--seeds must be different numbers, got {args.seeds}.")
    return args


def _mixtures(names: Sequence[str] | None) -> dict[str, str]:
    """What ``moe`` is set to for each row; runs are stored by the file's stem."""
    if names is None:
        all_names = {file.stem for file in (CONFIGS / MOE).glob("*.py")}
        names = ["dense", *sorted(all_names - {"dense", *SECOND_STAGES})]
    chosen: dict[str, str] = {}
    for name in names:
        stem = find_config(name, MOE).stem
        if stem in chosen:
            raise ConfigError(
                f"--moe names {stem!r} twice, and the runs of both would be stored in "
                "one folder; leave one out, or rename a file."
            )
        chosen[stem] = name
    return chosen


def _row_of_runs(
    args: argparse.Namespace, mixtures: Mapping[str, str], folder: str, *options: str
) -> dict[str, TrainingRun]:
    """One training of each mixture of experts; ``options`` win over the user's."""
    keys = {option.split("=")[0] for option in options}
    options += tuple(o for o in args.cfg_options if o.split("=")[0] not in keys)
    return {
        name: TrainingRun(
            args.config,
            Path(args.work_dir) / name / folder,
            (f"moe={moe}", *options),
            is_scored=folder.startswith("seed"),
        )
        for name, moe in mixtures.items()
    }


def _finish(
    rows: Sequence[Mapping[str, TrainingRun]], console: Console, *, jobs: int
) -> list[TrainingRun]:
    """Run what has not finished yet; returns what failed."""
    runs = [run for row in rows for run in row.values()]
    open_runs = [run for run in runs if run.summary() is None]
    if not open_runs:
        return []
    threads = max(1, (os.cpu_count() or 1) // jobs)
    started = time.monotonic()
    console.print(
        f"{len(runs)} runs, {len(runs) - len(open_runs)} finished before; "
        f"{jobs} at a time, {threads} threads each"
    )
    failed = []
    ended = run_all(open_runs, jobs=jobs, threads=threads)
    for done, (run, status) in enumerate(ended, 1):
        left = (time.monotonic() - started) / done * (len(open_runs) - done)
        summary = run.summary() if status == 0 else None
        if summary is None:
            failed.append(run)
            result = f"FAILED ({run.last_words()})"
        else:
            score = summary.get("mean_ap50")
            result = "timed" if score is None else f"mean AP50 {score:.3f}"
        console.print(
            f"{done}/{len(open_runs)} {run.folder}: {result}; {left / 60:.0f} min left",
            soft_wrap=True,
            highlight=False,
        )
    return failed


def _summaries(rows: Sequence[Mapping[str, TrainingRun]], name: str) -> list[dict]:
    return [found for row in rows if (found := row[name].summary()) is not None]


def _write(folder: Path, rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = markdown_table(rows)
    (folder / "comparison.md").write_text(table, encoding="utf-8")
    text = json.dumps(rows, indent=2) + "\n"
    (folder / "comparison.json").write_text(text, encoding="utf-8")
    console.print(table, soft_wrap=True, highlight=False)
    draw_comparison(rows).savefig(folder / "comparison.png", dpi=150)
    console.print(f"written: {folder / 'comparison.md'}, comparison.json and .png")


@dataclass(frozen=True)
class TrainingRun:
    """One training in a process of its own; finished when its folder has a summary.

    Attributes:
        config: Config file.
        folder: Work directory of the run.
        options: ``key=value`` overrides of the config.
        is_scored: Whether it has not finished without an evaluation.
    """

    config: str
    folder: Path
    options: tuple[str, ...]
    is_scored: bool = False

    @property
    def log(self) -> Path:
        """The file that holds what the run wrote to the screen."""
        return self.folder / "screen.log"

    def summary(self) -> dict[str, Any] | None:
        """What the finished run measured; None if it has not finished.

        Raises:
            ConfigError: If the folder holds a run with other settings.
            DataError: If the summary is no JSON.
        """
        path = self.folder / "summary.json"
        if not path.is_file():
            return None
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path} is no JSON ({error}); delete the folder to run it again."
            ) from error
        command, _, options = summary.get("command", "").partition(" --cfg-options ")
        is_same = {*shlex.split(options)} == {*self.options}
        if not is_same or self.config not in shlex.split(command):
            raise ConfigError(
                f"{path} belongs to a run with other settings: {summary['command']}. "
                "Name another --work-dir, or delete that folder."
            )
        return None if self.is_scored and not summary["datasets"] else summary

    def start(self, *, threads: int) -> subprocess.Popen[bytes]:
        """Start it on some threads, or go on from its last checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        resume = ["--resume"] if (self.folder / "last_checkpoint").is_file() else []
        command = [
            *[sys.executable, "-m", "damex", "train", self.config, *resume],
            *["--work-dir", str(self.folder), "--cfg-options", *self.options],
        ]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )

    def last_words(self) -> str:
        """The last line of the log that is not empty, for instance its error."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it wrote nothing"


POLL_SECONDS = 0.5


def run_all(
    runs: Sequence[TrainingRun], *, jobs: int, threads: int
) -> Iterator[tuple[TrainingRun, int]]:
    """Start trainings in their order and hand them over in the order of their ends.

    Args:
        runs: The trainings.
        jobs: How many run at a time.
        threads: Threads of each.

    Yields:
        A training and its exit status.
    """
    waiting = list(runs)
    active: dict[TrainingRun, subprocess.Popen[bytes]] = {}
    with _sigterm_unwinds():
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    run = waiting.pop(0)
                    active[run] = run.start(threads=threads)
                time.sleep(POLL_SECONDS)
                for run, process in list(active.items()):
                    if process.poll() is not None:
                        del active[run]
                        yield run, process.returncode
        finally:
            for process in active.values():
                process.terminate()
            for process in active.values():
                process.wait()


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let a terminated command clean up as an interrupted one does.

    By default SIGTERM, which schedulers and ``kill`` send, ends Python on the spot, and
    the trainings would go on alone.
    """

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
