"""``damex headroom``: is there any headroom for experts?

Each rung of the ladder is a training in ``WORK_DIR/RUNG/seedN`` of the config
``WORK_DIR/RUNG/config.py``. Finished runs are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmengine.config import Config
from rich.console import Console

from damex.commandline.commands import RUNGS
from damex.config_files import config_of
from damex.errors import ConfigError
from damex.headroom.baselines import (
    RECIPE,
    Baseline,
    baselines_of,
    experts_of,
    read_joint,
)
from damex.headroom.report import dot_plot, ladder_table, report
from damex.headroom.runs import (
    check_finished,
    check_seeds,
    finish,
    fit_to_job,
    training,
    write_config,
)
from damex.models.sites import COMPONENTS

# Rungs that re-evaluate the trainings of another one, and by which ablation.
REEVALUATED = MappingProxyType(
    {"oracle": (RECIPE, "oracle"), "zeroed": ("dense", "ablate_ffns")}
)
ABOUT_ZEROED = (
    "AP of the trained dense detector when an FFN adds nothing to its input. It shows "
    "how much the detector depends on it, not how much a better FFN would win."
)


def headroom(
    config: str,
    *,
    cfg_options: Sequence[str],
    rungs: Sequence[str],
    experts: Sequence[str],
    seeds: Sequence[int],
    work_dir: str,
    jobs: int,
    amp: bool,
) -> None:
    """Train the rungs, write table and plot, and print the verdict."""
    check_seeds(seeds)
    names = list(dict.fromkeys(rungs))
    console, folder = Console(markup=False, emoji=False), Path(work_dir)
    cfg = config_of(config, cfg_options)
    _check_checkpoints(cfg, names)
    joint = read_joint(cfg)
    trained = baselines_of(joint, ["dense", *(n for n in names if n != "zeroed")])
    scored = experts_of(joint, experts)
    trained += _new(scored, trained)
    notes = {rung.name: fit_to_job(rung.config, amp=amp) for rung in trained}
    _print_cost(trained, notes, names, len(seeds), console)
    configs = {r.name: write_config(r.config, folder / r.name) for r in trained}
    # Seed by seed, so that an interrupted ladder covers all rungs.
    runs = {
        (name, seed): training(path, seed)
        for seed in seeds
        for name, path in configs.items()
    }
    failed = finish(list(runs.values()), console, jobs=jobs)
    again = {
        (name, seed): runs[rung, seed].evaluation(name, command)
        for name, (rung, command) in REEVALUATED.items()
        for seed in seeds
        if name in names and runs[rung, seed] not in failed
    }
    failed += finish(list(again.values()), console, jobs=jobs)
    found = {key: run.summary() for key, run in (runs | again).items()}
    rows = [*configs, *(name for name in REEVALUATED if name in names)]
    result = report(
        {name: [found.get((name, seed)) for seed in seeds] for name in rows},
        datasets=list(joint.shares),
        seeds=seeds,
        experts=[rung.name for rung in scored],
    )
    _write(folder, result, console)
    check_finished(failed)


def _new(experts: Sequence[Baseline], rungs: Sequence[Baseline]) -> list[Baseline]:
    """Experts that are not yet among the rungs (the oracle's may be)."""
    known = {rung.name: rung.config.to_dict() for rung in rungs}
    for rung in experts:
        if known.get(rung.name, rung.config.to_dict()) != rung.config.to_dict():
            raise ConfigError(
                f"--experts names a file {rung.name!r} that is not the one of damex, "
                "which the rung oracle trains; rename it, or leave oracle out."
            )
    return [rung for rung in experts if rung.name not in known]


def _check_checkpoints(cfg: Config, rungs: Sequence[str]) -> None:
    """Reject trainings without checkpoints if a rung evaluates them again."""
    again = [name for name in rungs if name in REEVALUATED]
    if again and (cfg.get("default_hooks") or {}).get("checkpoint", {}) is None:
        raise ConfigError(
            f"default_hooks.checkpoint is None, and {' and '.join(again)} evaluate "
            "checkpoints; set dict(type='CheckpointHook'), or leave them out with "
            "--rungs."
        )


def _print_cost(
    rungs: Sequence[Baseline],
    notes: Mapping[str, str],
    names: Sequence[str],
    seeds: int,
    console: Console,
) -> None:
    """Print how much will be trained, with the note of each rung."""
    lines = [
        f"{rung.name}: {seeds} x {rung.images:,} images"
        + (f", {notes[rung.name]}" if notes[rung.name] else "")
        for rung in rungs
    ]
    images = seeds * sum(rung.images for rung in rungs)
    lines.append(f"together {seeds * len(rungs)} trainings, {images:,} images")
    if "zeroed" in names:
        layers = [rungs[0].config.model.get(name) or {} for name in COMPONENTS]
        count = 1 + sum(layer.get("num_layers", 0) + 1 for layer in layers)
        lines.append(f"zeroed: {seeds} x {count} evaluations of dense")
    if "oracle" in names:
        lines.append(f"oracle: {seeds} evaluations of {RECIPE}")
    if rungs[0].config.get("load_from") is not None:
        lines.append("load_from: parameters without weights in it start at random")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _write(folder: Path, result: Mapping[str, Any], console: Console) -> None:
    """Write headroom.md, .json and .png, and print the first."""
    rungs, zeroed = result["rungs"], result["zeroed"]
    parts = [ladder_table(rungs, kind="rung")]
    absent = [name for name in RUNGS if name not in rungs and name != "zeroed"]
    if absent:
        parts.append(f"Not included: {', '.join(absent)}.\n")
    if result["missing"]:
        gaps = ", ".join(f"seed {seed} of {name}" for name, seed in result["missing"])
        parts.append(f"Missing: {gaps}. Differences are over common seeds.\n")
    if zeroed:
        parts += [ladder_table(zeroed, kind="zeroed FFN"), ABOUT_ZEROED + "\n"]
    said = [result["verdict"], *result["experts"].values()]
    parts += [one["text"] + "\n" for one in said]
    text = "\n".join(parts)
    (folder / "headroom.md").write_text(text, encoding="utf-8")
    plain = json.dumps(result, indent=2) + "\n"
    (folder / "headroom.json").write_text(plain, encoding="utf-8")
    dots = {name: row["mean_ap"] for name, row in rungs.items()}
    dot_plot(dots, score="mean AP").savefig(folder / "headroom.png", dpi=150)
    console.print(text, soft_wrap=True, highlight=False)
    console.print(f"written: {folder / 'headroom.md'}, headroom.json and .png")
