"""The command behind ``tools/compare_moe.py``: one config, several mixtures of experts.

Every run is a training of its own in ``WORK_DIR/NAME/seedN``. What has finished is not
run again, so a killed comparison goes on where it was, and more seeds or mixtures can
be added later.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from damex.analysis.comparison_figure import draw_comparison
from damex.analysis.comparison_table import comparison_row, markdown_table
from damex.analysis.training_pool import run_all
from damex.analysis.training_run import TrainingRun
from damex.errors import ConfigError, did_you_mean

__all__ = ["compare_moe"]

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
