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
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from damex.errors import ConfigError, DataError, did_you_mean

__all__ = [
    "TrainingRun",
    "compare_moe",
    "comparison_row",
    "draw_comparison",
    "markdown_table",
    "run_all",
]

MOE_FOLDER = Path("configs/_base_/moe")
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
    mixtures = _mixtures(args.moe or _all_names())
    scored = {
        name: [_scored_run(args, name, file, seed) for seed in args.seeds]
        for name, file in mixtures.items()
    }
    # Seed by seed, so that a comparison that is cut short has something of each.
    by_seed = [run for runs in zip(*scored.values(), strict=True) for run in runs]
    failed = _finish(by_seed, console, jobs=args.jobs)
    timed = {
        name: [_timed_run(args, name, file, n) for n in range(args.timed_rounds)]
        for name, file in mixtures.items()
    }
    # Round by round and one at a time: a busy moment hits all mixtures alike.
    rounds = [run for runs in zip(*timed.values(), strict=True) for run in runs]
    failed += _finish(rounds, console, jobs=1)
    rows = [
        comparison_row(name, _summaries(scored[name]), _summaries(timed[name]))
        for name in mixtures
    ]
    _write(Path(args.work_dir), rows, console)
    if failed:
        raise ConfigError(
            f"{len(failed)} runs failed and are missing in the table; see "
            + ", ".join(str(run.log) for run in failed)
        )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train one config with several mixtures of experts and seeds"
    )
    parser.add_argument("config", help="config file")
    parser.add_argument(
        "--moe",
        nargs="+",
        help="names of files in configs/_base_/moe, or paths; the first row is what "
        "times are compared with (default: dense, then all others)",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--work-dir", default="work_dirs/compare_moe")
    parser.add_argument(
        "--jobs", type=int, default=1, help="trainings at a time, which share the cores"
    )
    parser.add_argument(
        "--timed-rounds",
        type=int,
        default=3,
        help="short runs of each mixture that measure time and memory; 0 for none",
    )
    parser.add_argument(
        "--timed-samples", type=int, default=320, help="samples in a timed run"
    )
    parser.add_argument(
        "--cfg-options", nargs="+", default=[], help="overrides for all runs: key=value"
    )
    args = parser.parse_args(arguments)
    if not Path(args.config).is_file():
        raise ConfigError(f"there is no config file {args.config}; see configs/.")
    if len(set(args.seeds)) < len(args.seeds):
        raise ConfigError(f"--seeds must be different numbers, got {args.seeds}.")
    for name, least in (("jobs", 1), ("timed_rounds", 0), ("timed_samples", 1)):
        if getattr(args, name) < least:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be {least} or more, got "
                f"{getattr(args, name)}."
            )
    return args


def _all_names() -> list[str]:
    """Every shipped mixture of experts, the dense detector first."""
    names = {path.stem for path in MOE_FOLDER.glob("*.py")}
    return ["dense", *sorted(names - {"dense", *SECOND_STAGES})]


def _mixtures(names: Sequence[str]) -> dict[str, str]:
    """The file of each mixture of experts; runs are stored by its stem."""
    files: dict[str, str] = {}
    for name in names:
        stem = Path(name).stem
        if stem in files:
            raise ConfigError(
                f"--moe names {stem!r} twice, and the runs of both would be stored in "
                "one folder; leave one out, or rename a file."
            )
        files[stem] = _moe_file(name)
    return files


def _moe_file(name: str) -> str:
    """The file behind a name or path."""
    for path in (Path(name), MOE_FOLDER / f"{name}.py"):
        if path.is_file():
            return str(path)
    raise ConfigError(
        f"--moe names {name!r}, which is no file and not in {MOE_FOLDER}; "
        f"{did_you_mean(name, _all_names())}"
    )


def _scored_run(
    args: argparse.Namespace, name: str, file: str, seed: int
) -> TrainingRun:
    return TrainingRun(
        args.config,
        Path(args.work_dir) / name / f"seed{seed}",
        (f"randomness.seed={seed}", f"moe={file}", *args.cfg_options),
        is_scored=True,
    )


def _timed_run(
    args: argparse.Namespace, name: str, file: str, number: int
) -> TrainingRun:
    """One short epoch, without the evaluation."""
    short = (
        "train_cfg.max_epochs=1",
        "train_cfg.val_begin=9",
        f"train_dataloader.sampler.samples_per_epoch={args.timed_samples}",
    )
    keys = {option.split("=")[0] for option in short}
    kept = [o for o in args.cfg_options if o.split("=")[0] not in keys]
    return TrainingRun(
        args.config,
        Path(args.work_dir) / name / f"timed{number}",
        (f"moe={file}", *kept, *short),
    )


def _finish(
    runs: Sequence[TrainingRun], console: Console, *, jobs: int
) -> list[TrainingRun]:
    """Run what has not finished yet; returns what failed."""
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


def _summaries(runs: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    return [summary for run in runs if (summary := run.summary()) is not None]


def _write(folder: Path, rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = markdown_table(rows)
    (folder / "comparison.md").write_text(table, encoding="utf-8")
    text = json.dumps(rows, indent=2) + "\n"
    (folder / "comparison.json").write_text(text, encoding="utf-8")
    console.print(table, soft_wrap=True, highlight=False)
    draw_comparison(rows).savefig(folder / "comparison.png", dpi=150)
    console.print(f"written: {folder / 'comparison.md'}, comparison.json and .png")


TRAIN = Path(__file__).parents[2] / "tools" / "train.py"


@dataclass(frozen=True)
class TrainingRun:
    """One call of ``tools/train.py``; finished when its folder has a summary.

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
        found = _settings(shlex.split(summary.get("command", "")))
        if found != (self.config, frozenset(self.options)):
            raise ConfigError(
                f"{path} belongs to a run with other settings: {summary['command']}. "
                "Name another --work-dir, or delete that folder."
            )
        return None if self.is_scored and not summary["datasets"] else summary

    def start(self, *, threads: int) -> subprocess.Popen[bytes]:
        """Start it, or go on from its last checkpoint.

        Args:
            threads: Threads for the computation.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        resume = ["--resume"] if (self.folder / "last_checkpoint").is_file() else []
        command = [
            *[sys.executable, str(TRAIN), self.config, *resume],
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


def _settings(command: list[str]) -> tuple[str, frozenset[str]]:
    """Config and overrides in a recorded command, wherever its results were put."""
    if "--cfg-options" not in command or len(command) < 2:
        return "", frozenset()
    cut = command.index("--cfg-options")
    return command[1], frozenset(command[cut + 1 :])


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
            _end(list(active.values()))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
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


HEADER = (
    "mixture of experts",
    "mean AP50",
    "mean AP",
    "routing accuracy",
    "max load",
    "s / iteration",
    "against the first row",
    "peak memory",
)


def comparison_row(
    name: str,
    scored: Sequence[Mapping[str, Any]],
    timed: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Mean and spread over seeds, and medians over timed rounds.

    Args:
        name: Name of the row.
        scored: ``summary.json`` of one run per seed.
        timed: ``summary.json`` of the short runs that measure time and memory.

    Returns:
        ``ap50``, ``ap``, ``routing_accuracy`` and ``max_load``, each a pair of mean and
        sample standard deviation (None where a run has no such number, the deviation
        None for one run), ``ap50_seeds`` with the AP50 of every run, ``datasets`` with
        the mean AP50 of each, ``seeds``, ``seconds_per_iteration`` and
        ``peak_memory_mib``.
    """
    shares = [(run.get("routing_accuracy") or {}).get("mean") for run in scored]
    names = scored[0]["datasets"] if scored else ()
    return dict(
        name=name,
        seeds=len(scored),
        ap50=_spread([run["mean_ap50"] for run in scored]),
        ap50_seeds=[run["mean_ap50"] for run in scored],
        ap=_spread([run["mean_ap"] for run in scored]),
        routing_accuracy=_spread(shares),
        max_load=_spread([run.get("max_load") for run in scored]),
        datasets={
            dataset: _spread([run["datasets"][dataset]["ap50"] for run in scored])
            for dataset in names
        },
        seconds_per_iteration=_median(
            [run["train_seconds"] / run["iterations"] for run in timed]
        ),
        peak_memory_mib=_median([run["peak_memory_mib"] for run in timed]),
    )


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown: quality with its spread, shares, time and memory.

    Args:
        rows: As :func:`comparison_row` makes them; times are compared with the first.
    """
    base = rows[0]["seconds_per_iteration"] if rows else None
    lines = [HEADER, ("---",) + ("---:",) * (len(HEADER) - 1)]
    lines += [_cells(row, base) for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _cells(row: Mapping[str, Any], base: float | None) -> tuple[str, ...]:
    seconds, memory = row["seconds_per_iteration"], row["peak_memory_mib"]
    return (
        row["name"],
        _plus_minus(row["ap50"]),
        _plus_minus(row["ap"]),
        _percent(row["routing_accuracy"]),
        _percent(row["max_load"]),
        "-" if seconds is None else f"{seconds:.3f}",
        "-" if seconds is None or base is None else f"{seconds / base:.2f}",
        "-" if memory is None else f"{memory:.0f} MiB",
    )


def _spread(
    values: Sequence[float | None],
) -> tuple[float, float | None] | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    deviation = statistics.stdev(known) if len(known) > 1 else None
    return statistics.fmean(known), deviation


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _plus_minus(spread: tuple[float, float | None] | None) -> str:
    if spread is None:
        return "-"
    mean, deviation = spread
    return f"{mean:.3f}" if deviation is None else f"{mean:.3f} ± {deviation:.3f}"


def _percent(spread: tuple[float, float | None] | None) -> str:
    return "-" if spread is None else f"{spread[0]:.1%}"


def draw_comparison(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Mean AP50 of each mixture of experts beside the first row's.

    Args:
        rows: As :func:`damex.analysis.compare.comparison_row` makes them.
            Those without a finished run are left out.
    """
    shown = [row for row in rows if row["ap50_seeds"]]
    figure = Figure(figsize=(7.5, 1.2 + 0.3 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(shown):
        values = row["ap50_seeds"]
        axes.plot(values, [place] * len(values), "o", color="#2a6f97", alpha=0.6)
        axes.plot(row["ap50"][0], place, "|", color="black", markersize=14)
    if shown:
        mean, deviation = shown[0]["ap50"]
        axes.axvline(mean, color="#b2603a", linewidth=1)
        if deviation is not None:
            reach = (mean - deviation, mean + deviation)
            axes.axvspan(*reach, color="#b2603a", alpha=0.15)
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(
        "mean AP50 (dots: seeds, bars: their mean, band: first row, mean and deviation)"
    )
    return figure
