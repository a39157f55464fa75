"""The command ``damex compare_moe``: one config, several mixtures of experts.

Every run is a training of its own in ``WORK_DIR/NAME/seedN``. What has finished is not
run again, so a killed comparison goes on where it was, and more seeds or mixtures can
be added later.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from damex.analysis.comparison import (
    comparison_row,
    markdown_table,
    with_differences,
)
from damex.analysis.dot_plot import dot_plot
from damex.analysis.runs import (
    Run,
    check_finished,
    check_seeds,
    finish,
)
from damex.commandline.commands import compare_moe_parser
from damex.engine.config_files import CONFIGS, MOE, find_config
from damex.errors import ConfigError

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
    failed = finish(_in_order(scored), console, jobs=args.jobs)
    # One short epoch, without the evaluation. Round by round and one at a time: a busy
    # moment hits all mixtures alike.
    samples = f"train_dataloader.sampler.samples_per_epoch={args.timed_samples}"
    short = ("max_epochs=1", "train_cfg.val_begin=9", samples)
    numbers = range(args.timed_rounds)
    timed = [_row_of_runs(args, mixtures, f"timed{n}", *short) for n in numbers]
    failed += finish(_in_order(timed), console, jobs=1)
    rows = [
        comparison_row(name, _summaries(scored, name), _summaries(timed, name))
        for name in mixtures
    ]
    rows = with_differences(rows)
    _write(Path(args.work_dir), rows, console)
    check_finished(failed)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    args = compare_moe_parser().parse_args(arguments)
    find_config(args.config)
    check_seeds(args.seeds)
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
) -> dict[str, Run]:
    """One training of each mixture of experts; ``options`` win over the user's."""
    keys = {option.split("=")[0] for option in options}
    options += tuple(o for o in args.cfg_options if o.split("=")[0] not in keys)
    return {
        name: Run(
            args.config,
            Path(args.work_dir) / name / folder,
            (f"moe={moe}", *options),
            is_scored=folder.startswith("seed"),
        )
        for name, moe in mixtures.items()
    }


def _in_order(rows: Sequence[Mapping[str, Run]]) -> list[Run]:
    return [run for row in rows for run in row.values()]


def _summaries(rows: Sequence[Mapping[str, Run]], name: str) -> list[dict | None]:
    """One summary per row of runs; None where a run failed."""
    return [row[name].summary() for row in rows]


def _write(folder: Path, rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = markdown_table(rows)
    (folder / "comparison.md").write_text(table, encoding="utf-8")
    text = json.dumps(rows, indent=2) + "\n"
    (folder / "comparison.json").write_text(text, encoding="utf-8")
    console.print(table, soft_wrap=True, highlight=False)
    dots = {row["name"]: row["ap50_seeds"] for row in rows}
    dot_plot(dots, score="mean AP50").savefig(folder / "comparison.png", dpi=150)
    console.print(f"written: {folder / 'comparison.md'}, comparison.json and .png")
