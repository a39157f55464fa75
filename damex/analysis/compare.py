"""``damex compare_moe``: one config, several mixtures of experts.

Runs are trainings in ``WORK_DIR/NAME/seedN`` of ``WORK_DIR/NAME/config.py``. Finished
runs are skipped, so a killed comparison can be continued, and seeds or mixtures can be
added later.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config
from rich.console import Console

from damex.analysis.comparison import (
    comparison_row,
    dot_plot,
    markdown_table,
    with_differences,
)
from damex.analysis.runs import (
    Run,
    check_finished,
    check_seeds,
    finish,
    training,
    write_config,
)
from damex.commandline.measuring import compare_moe_parser
from damex.engine.config_files import (
    CONFIGS,
    MOE,
    find_config,
    merge_options,
    moe_of_file,
    read_config,
)
from damex.engine.schedule import length_key, set_length
from damex.errors import ConfigError

# Not compared by default: they start from another training's checkpoint.
SECOND_STAGES = ("deepmoe_stage2",)


def compare_moe(arguments: Sequence[str]) -> None:
    """Train, measure and write the table; ConfigError if a run failed."""
    args = compare_moe_parser().parse_args(arguments)
    check_seeds(args.seeds)
    console, folder = Console(markup=False, emoji=False), Path(args.work_dir)
    mixtures, base = _mixtures(args.moe), read_config(args.config)
    complete = {
        name: _config_with(moe, base, args.cfg_options or {})
        for name, moe in mixtures.items()
    }
    configs = {name: write_config(cfg, folder / name) for name, cfg in complete.items()}
    # Seed by seed, so that an interrupted comparison covers all mixtures.
    scored = [
        {name: training(config, seed) for name, config in configs.items()}
        for seed in args.seeds
    ]
    failed = finish(_in_order(scored), console, jobs=args.jobs)
    # Round by round, one at a time: background load affects all mixtures alike.
    timed = [
        {
            name: Run(
                str(config),
                config.parent / f"timed{number}",
                _short(complete[name], args.timed_samples),
            )
            for name, config in configs.items()
        }
        for number in range(args.timed_rounds)
    ]
    failed += finish(_in_order(timed), console, jobs=1)
    rows = [
        comparison_row(name, _summaries(scored, name), _summaries(timed, name))
        for name in mixtures
    ]
    rows = with_differences(rows)
    _write(folder, rows, console)
    check_finished(failed)


def _mixtures(names: Sequence[str] | None) -> dict[str, str]:
    """Values of ``moe`` by row; runs are stored under the file's stem."""
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


def _config_with(moe: str, base: Config, options: Mapping[str, Any]) -> Config:
    """The complete config of a row, independent of later edits to other files."""
    if "moe" in options:
        raise ConfigError(
            f"--cfg-options moe={options['moe']}: name what is compared with --moe."
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


def _write(folder: Path, rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = markdown_table(rows)
    (folder / "comparison.md").write_text(table, encoding="utf-8")
    text = json.dumps(rows, indent=2) + "\n"
    (folder / "comparison.json").write_text(text, encoding="utf-8")
    console.print(table, soft_wrap=True, highlight=False)
    dots = {row["name"]: row["ap50_seeds"] for row in rows}
    dot_plot(dots, score="mean AP50").savefig(folder / "comparison.png", dpi=150)
    console.print(f"written: {folder / 'comparison.md'}, comparison.json and .png")
