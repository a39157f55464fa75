"""One config, several mixtures of experts, compared over seeds.

Run as ``python tools/analysis/compare_moe.py CONFIG``. Runs are trainings in
``WORK_DIR/NAME/seedN`` of ``WORK_DIR/NAME/config.py``. Finished runs are skipped, so
that a killed comparison can be continued, and seeds or mixtures can be added later.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config
from rich.console import Console

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
from damex.config_files import (
    CONFIGS,
    MOE,
    find_config,
    merge_options,
    moe_of_file,
    read_config,
)
from damex.engine.optim import length_key, set_length
from damex.engine.summary import markdown
from damex.errors import ConfigError
from damex.options import parse_options
from damex.workbench.cli.run import (
    CfgOptions,
    ConfigName,
    Jobs,
    NonNegativeInt,
    PositiveInt,
    Seeds,
    program,
    run_command,
)
from damex.workbench.headroom.command import cell
from damex.workbench.headroom.runs import (
    Run,
    check_finished,
    finish,
    fit_to_job,
    training_run,
    write_config,
)
from damex.workbench.headroom.verdict import Spread, paired_difference, spread

HEADER = (
    "mixture of experts",
    "mean AP50",
    "minus the first row's [95%]",
    "mean AP",
    "pooled AP",
    "routing accuracy",
    "max load",
    "s / iteration",
    "times the first row's",
    "peak memory",
)
# Not compared by default: they start from another training's checkpoint.
SECOND_STAGES = ("deepmoe_stage2",)


app = program(
    "python tools/analysis/compare_moe.py",
    "Train one config with several mixtures of experts and seeds.",
    "python tools/analysis/compare_moe.py my_mixture.py --moe dense damex",
)


@app.default
def compare_moe(
    config: ConfigName,
    /,
    *,
    cfg_options: CfgOptions = (),
    moe: tuple[str, ...] = (),
    seeds: Seeds = (0, 1, 2),
    work_dir: str = "work_dirs/compare_moe",
    jobs: Jobs = 1,
    amp: bool = False,
    timed_rounds: NonNegativeInt = 3,
    timed_samples: PositiveInt = 320,
) -> None:
    """Train, measure and write the table.

    Args:
        config: A file, or the name of a config of damex.
        cfg_options: Overrides of its settings.
        moe: Names of files in configs/_base_/moe, or paths; AP50 and times are compared
            with the first (default: dense, then all others).
        seeds: Of the trainings.
        work_dir: Output folder.
        jobs: Trainings at a time.
        amp: Mixed-precision training.
        timed_rounds: Short runs of each mixture that measure time and memory.
        timed_samples: Samples in a timed run.
    """
    seeds = tuple(dict.fromkeys(seeds))
    console, folder = Console(markup=False, emoji=False), Path(work_dir)
    mixtures, base = _mixtures(moe), read_config(config)
    options = parse_options(cfg_options)
    complete = {name: _config_with(m, base, options) for name, m in mixtures.items()}
    for name, cfg in complete.items():
        if note := fit_to_job(cfg, amp=amp):
            console.print(f"{name}: {note}", highlight=False)
    configs = {name: write_config(cfg, folder / name) for name, cfg in complete.items()}
    # Seed by seed, so that an interrupted comparison covers all mixtures.
    scored = [
        {name: training_run(path, seed) for name, path in configs.items()}
        for seed in seeds
    ]
    failed = finish(_in_order(scored), console, jobs=jobs)
    short = {name: _short(cfg, timed_samples) for name, cfg in complete.items()}
    # Round by round, one at a time: background load affects all mixtures alike.
    timed = [
        {
            name: Run(str(path), path.parent / f"timed{number}", short[name])
            for name, path in configs.items()
        }
        for number in range(timed_rounds)
    ]
    failed += finish(_in_order(timed), console, jobs=1)
    rows = [
        comparison_row(name, _summaries(scored, name), _summaries(timed, name))
        for name in mixtures
    ]
    _write(folder, with_differences(rows), console)
    check_finished(failed)


def _mixtures(names: Sequence[str]) -> dict[str, str]:
    """Values of ``moe`` by row; runs are stored under the file's stem."""
    if not names:
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


def _config_with(moe: str, base: Config, options: Mapping[str, Any]) -> Config:
    """The complete config of a row, independent of later edits to other files."""
    if "moe" in options:
        raise ConfigError(
            f"--cfg-options moe={options['moe']}: name the mixtures with --moe."
        )
    cfg = copy.deepcopy(base)
    cfg["model"].pop("moe", None)  # set by a written config
    cfg["moe"] = moe_of_file(moe)
    merge_options(cfg, options)
    set_length(cfg)
    cfg.pop("work_dir", None)  # set for each run
    return cfg


def _short(cfg: Config, samples: int) -> tuple[str, ...]:
    """Options for one short epoch, or as many iterations, without evaluation."""
    if length_key(cfg.get("train_cfg") or {}) == "max_epochs":
        sampler = f"train_dataloader.sampler.samples_per_epoch={samples}"
        return "max_epochs=1", "train_cfg.val_begin=9", sampler
    iters = max(1, samples // cfg["train_dataloader"]["batch_size"])
    return f"max_iters={iters}", f"train_cfg.val_begin={iters + 1}"


def _in_order(rows: Sequence[Mapping[str, Run]]) -> list[Run]:
    return [run for row in rows for run in row.values()]


def _summaries(rows: Sequence[Mapping[str, Run]], name: str) -> list[dict | None]:
    return [row[name].summary() for row in rows]


def comparison_row(
    name: str,
    scored: Sequence[Mapping[str, Any] | None],
    timed: Sequence[Mapping[str, Any] | None] = (),
) -> dict[str, Any]:
    """Mean and spread over seeds, and medians over timed rounds.

    Args:
        name: Name of the row.
        scored: ``summary.json`` of one run per seed; None if unfinished.
        timed: ``summary.json`` of the short runs that measure time and memory.

    Returns:
        Pairs of mean and sample deviation (None if a run lacks the number; no deviation
        for a single run) as ``ap50``, ``ap``, ``pooled_ap``, ``routing_accuracy``,
        ``max_load`` and, by dataset, ``datasets`` (AP50); ``ap50_seeds`` with the AP50
        of every seed; ``seeds``, the number of finished ones; ``seconds_per_iteration``
        and ``peak_memory_mib``.
    """
    runs = [run for run in scored if run is not None]
    rounds = [run for run in timed if run is not None and _trained(run)]
    shares = [(run.get("routing_accuracy") or {}).get("mean") for run in runs]
    names = runs[0]["datasets"] if runs else ()
    return dict(
        name=name,
        seeds=len(runs),
        ap50=_spread([run["mean_ap50"] for run in runs]),
        ap50_seeds=[None if run is None else run["mean_ap50"] for run in scored],
        ap=_spread([run["mean_ap"] for run in runs]),
        pooled_ap=_spread([run.get("pooled_ap") for run in runs]),
        routing_accuracy=_spread(shares),
        max_load=_spread([run.get("max_load") for run in runs]),
        datasets={
            dataset: _spread([run["datasets"][dataset]["ap50"] for run in runs])
            for dataset in names
        },
        seconds_per_iteration=_median(
            [run["train_seconds"] / _trained(run) for run in rounds]
        ),
        peak_memory_mib=_median([run["peak_memory_mib"] for run in rounds]),
    )


def with_differences(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add ``ap50_minus_first`` to rows of the same seeds: mean and 95% interval.

    It is None for the first row, and without a seed finished in both.
    """
    return [
        dict(
            row,
            ap50_minus_first=paired_difference(row["ap50_seeds"], rows[0]["ap50_seeds"])
            if place
            else None,
        )
        for place, row in enumerate(rows)
    ]


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows of :func:`with_differences` as Markdown."""
    base = rows[0]["seconds_per_iteration"] if rows else None
    return markdown(HEADER, [_cells(row, base) for row in rows])


def _cells(row: Mapping[str, Any], base: float | None) -> tuple[str, ...]:
    seconds, memory = row["seconds_per_iteration"], row["peak_memory_mib"]
    return (
        row["name"],
        cell(row["ap50"]),
        cell(row["ap50_minus_first"]),
        cell(row["ap"]),
        cell(row["pooled_ap"]),
        _percent(row["routing_accuracy"]),
        _percent(row["max_load"]),
        "-" if seconds is None else f"{seconds:.3f}",
        "-" if seconds is None or not base else f"{seconds / base:.2f}",
        "-" if memory is None else f"{memory:.0f} MiB",
    )


def _trained(run: Mapping[str, Any]) -> int:
    """Iterations covered by ``train_seconds``; all of them in older summaries."""
    return run.get("trained_iterations", run["iterations"])


def _spread(values: Sequence[float | None]) -> Spread | None:
    """Spread, or None if a run lacks the number."""
    return None if None in values else spread(values)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _percent(spread: tuple[float, float | None] | None) -> str:
    return "-" if spread is None else f"{spread[0]:.1%}"


def _write(folder: Path, rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = markdown_table(rows)
    (folder / "comparison.md").write_text(table, encoding="utf-8")
    text = json.dumps(rows, indent=2) + "\n"
    (folder / "comparison.json").write_text(text, encoding="utf-8")
    console.print(table, soft_wrap=True, highlight=False)
    console.print(f"written: {folder / 'comparison.md'} and comparison.json")


if __name__ == "__main__":
    sys.exit(run_command(app))
