"""``damex headroom``: do experts have any headroom over dense baselines?

Each baseline is a training in ``WORK_DIR/BASELINE/seedN`` of the config
``WORK_DIR/BASELINE/config.py``. Finished runs are skipped.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config
from rich.console import Console

from damex.config_files import config_of
from damex.engine.resumption import latest_checkpoint
from damex.engine.summary import markdown
from damex.errors import ConfigError
from damex.files import write_json, write_text
from damex.workbench.cli.commands import BASELINES
from damex.workbench.headroom.baselines import (
    RECIPE,
    SINGLES,
    Training,
    baselines_of,
    experts_of,
    read_joint,
)
from damex.workbench.headroom.runs import (
    Run,
    check_finished,
    finish,
    fit_to_job,
    training_run,
    write_config,
)
from damex.workbench.headroom.verdict import (
    NO_VERDICT,
    Difference,
    best_dense,
    best_head,
    decide,
    is_above,
    paired_difference,
    spread,
)

SCORES = ("mean_ap50", "mean_ap", "pooled_ap")
Summary = Mapping[str, Any]
Row = dict[str, Any]  # of scores: lists over seeds, None if a run is missing


def headroom(
    config: str,
    *,
    cfg_options: Sequence[str],
    baselines: Sequence[str],
    experts: Sequence[str],
    seeds: Sequence[int],
    work_dir: str,
    jobs: int,
    amp: bool,
) -> None:
    """Train the baselines, write the table, and print the verdict."""
    seeds, names = list(dict.fromkeys(seeds)), list(dict.fromkeys(baselines))
    console, folder = Console(markup=False, emoji=False), Path(work_dir)
    cfg = config_of(config, cfg_options)
    _check_checkpoints(cfg, names)
    joint = read_joint(cfg)
    scored = experts_of(joint, experts)
    trained = _joined(baselines_of(joint, ["dense", *names]), scored)
    for one in trained:
        note = fit_to_job(one.config, amp=amp)
        cost = f"{one.name}: {len(seeds)} x {one.images:,} images"
        console.print(f"{cost}, {note}" if note else cost, highlight=False)
    images = len(seeds) * sum(one.images for one in trained)
    total = f"together {len(seeds) * len(trained)} trainings, {images:,} images"
    console.print(total, highlight=False)
    configs = {one.name: write_config(one.config, folder / one.name) for one in trained}
    # Seed by seed, so that an interrupted command covers all baselines.
    runs = {
        (one.name, seed): training_run(configs[one.name], seed, images=one.images)
        for seed in seeds
        for one in trained
    }
    failed = finish(list(runs.values()), console, jobs=jobs)
    if "oracle" in names:
        recipes = {s: runs[RECIPE, s] for s in seeds if runs[RECIPE, s] not in failed}
        again = _oracle_runs(trained, recipes, folder / "oracle")
        failed += finish(list(again.values()), console, jobs=jobs)
        runs |= again
    found = {key: run.summary() for key, run in runs.items()}
    rows = [*configs, *["oracle"] * ("oracle" in names)]
    result = report(
        {name: [found.get((name, seed)) for seed in seeds] for name in rows},
        datasets=list(joint.shares),
        seeds=seeds,
        experts=[one.name for one in scored],
    )
    _write(folder, result, console)
    check_finished(failed)


def _joined(
    baselines: Sequence[Training], experts: Sequence[Training]
) -> list[Training]:
    """All trainings, each once: the recipe may be both the oracle's and an expert's."""
    found = {one.name: one for one in baselines}
    for one in experts:
        known = found.setdefault(one.name, one)
        if known.config.to_dict() != one.config.to_dict():
            raise ConfigError(
                f"--experts names a file {one.name!r} that is not the one of damex, "
                "which the baseline oracle trains; rename it, or omit oracle."
            )
    return list(found.values())


def _oracle_runs(
    trained: Sequence[Training], recipes: Mapping[int, Run], folder: Path
) -> dict[tuple[str, int], Run]:
    """Evaluations of the trained recipe in which the dataset of each image is given."""
    cfg = copy.deepcopy(next(one.config for one in trained if one.name == RECIPE))
    cfg["moe"]["oracle"] = True
    cfg["test_cfg"] = dict(type="TestLoop")
    for key in ("dataloader", "evaluator"):  # the images of all other scores
        cfg[f"test_{key}"] = copy.deepcopy(cfg[f"val_{key}"])
    config = str(write_config(cfg, folder))
    return {
        ("oracle", seed): Run(
            config,
            folder / f"seed{seed}",
            command="test",
            inputs=(str(latest_checkpoint(run.folder)),),
        )
        for seed, run in recipes.items()
    }


def _check_checkpoints(cfg: Config, names: Sequence[str]) -> None:
    """Reject a training without checkpoints if one of them is evaluated again."""
    hooks = cfg.get("default_hooks") or {}
    if "oracle" in names and hooks.get("checkpoint", {}) is None:
        raise ConfigError(
            "default_hooks.checkpoint is None, and oracle evaluates checkpoints; set "
            "dict(type='CheckpointHook'), or remove oracle from --baselines."
        )


def report(
    summaries: Mapping[str, Sequence[Summary | None]],
    *,
    datasets: Sequence[str],
    seeds: Sequence[int],
    experts: Sequence[str] = (),
) -> dict[str, Any]:
    """Collect the summaries of each training, one per seed, as plain values.

    Returns:
        ``seeds``; ``missing``, pairs of a training and a seed; ``rows`` of scores with
        one number per seed and ``minus_dense``, the paired difference in mean AP;
        ``verdict``, its ``answer`` None if there is none, its ``text`` headed by
        :func:`best_head`; ``experts``, the gain of each, and of their rival
        ``partitioned``, over the better dense baseline.
    """
    rows = {name: score_row(found) for name, found in summaries.items()}
    if RECIPE not in experts:  # trained for the oracle
        rows.pop(RECIPE, None)
    for baseline in SINGLES:
        trainings = {n: f"{baseline}_{n}" for n in datasets}
        if found := {n: rows.pop(of) for n, of in trainings.items() if of in rows}:
            rows[baseline] = single_row(found)
    rows |= {name: rows.pop(name) for name in experts}  # below the baselines
    mean_ap = {name: row["mean_ap"] for name, row in rows.items()}
    verdict, (reference, _) = decide(mean_ap), best_dense(mean_ap)
    decided: Row = dict(answer=None, text=NO_VERDICT)
    if verdict is not None:
        speed = verdict.learning_speed
        decided = vars(verdict) | dict(
            differences={n: one._asdict() for n, one in verdict.differences.items()},
            learning_speed=speed and speed._asdict(),
            text=str(verdict),
        )
    decided["text"] = best_head(mean_ap) + decided["text"]
    runs = {n: zip(seeds, found, strict=True) for n, found in summaries.items()}
    return dict(
        seeds=list(seeds),
        missing=[(n, seed) for n, pairs in runs.items() for seed, x in pairs if not x],
        rows=with_differences(rows),
        verdict=decided,
        experts={
            name: outcome
            for name in ("partitioned", *experts)
            if name in rows and (outcome := _outcome(rows, name, reference))
        },
    )


def _outcome(rows: Mapping[str, Row], name: str, reference: str) -> Row | None:
    """Gain of a training over the reference; None without a common seed."""
    gain = paired_difference(rows[name]["mean_ap"], rows[reference]["mean_ap"])
    if gain is None:
        return None
    helps = is_above(gain)
    words = "helps" if helps else "is not shown to help"
    text = f"{name} {words}: {gain} over {reference} in mean AP."
    return dict(minus_best_dense=gain._asdict(), helps=helps, text=text)


def score_row(summaries: Sequence[Summary | None]) -> Row:
    """Scores of one training, from the summary of each seed, by dataset as well."""
    found = [summary for summary in summaries if summary is not None]
    row: Row = {key: [run and run[key] for run in summaries] for key in SCORES}
    row["datasets"] = {
        name: {
            key: [run and run["datasets"][name][key] for run in summaries]
            for key in ("ap50", "ap")
        }
        for name in (found[0]["datasets"] if found else ())
    }
    return row


def single_row(rows: Mapping[str, Row]) -> Row:
    """Combine the rows of single-dataset detectors into one.

    Means are over datasets, for seeds in which all finished. Nothing is pooled: no
    detector knows all classes.
    """
    row: Row = {}
    for key in ("mean_ap50", "mean_ap"):
        seeds = zip(*(one[key] for one in rows.values()), strict=True)
        row[key] = [None if None in each else statistics.fmean(each) for each in seeds]
    row["pooled_ap"] = [None] * len(row["mean_ap"])
    row["datasets"] = {
        name: scores
        for one in rows.values()
        for name, scores in one["datasets"].items()
    }
    return row


def with_differences(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Add ``minus_dense``: mean and ``ci95`` of the paired difference in mean AP.

    ``ci95`` is None for one seed; the entry is None for ``dense`` itself, or without a
    common seed.
    """
    dense, compared = rows.get("dense", {}).get("mean_ap"), {}
    for name, row in rows.items():
        gain = None if name == "dense" else paired_difference(row["mean_ap"], dense)
        compared[name] = {**row, "minus_dense": gain and gain._asdict()}
    return compared


def table_of(rows: Mapping[str, Row]) -> str:
    """Format the rows of :func:`with_differences` as Markdown: mean and deviation."""
    names = dict.fromkeys(n for row in rows.values() for n in row["datasets"])
    header = ["training", "mean AP50", "mean AP", "minus dense [95%]", "pooled AP"]
    lines = []
    for name, row in rows.items():
        gain = row["minus_dense"]
        cells = [
            spread(row["mean_ap50"]),
            spread(row["mean_ap"]),
            None if gain is None else Difference(**gain),
            spread(row["pooled_ap"]),
            *(spread(row["datasets"].get(n, {}).get("ap", ())) for n in names),
        ]
        lines.append([name, *map(cell, cells)])
    return markdown([*header, *(f"{name} AP" for name in names)], lines)


def cell(value: Any) -> str:
    """Format a table cell; ``-`` for None."""
    return "-" if value is None else str(value)


def _write(folder: Path, result: Mapping[str, Any], console: Console) -> None:
    """Write headroom.md and headroom.json, and print the former."""
    parts = [table_of(result["rows"])]
    if absent := [name for name in BASELINES if name not in result["rows"]]:
        parts.append(f"Not included: {', '.join(absent)}.\n")
    if result["missing"]:
        gaps = ", ".join(f"seed {seed} of {name}" for name, seed in result["missing"])
        parts.append(f"Missing: {gaps}. Differences are over common seeds.\n")
    decisions = [result["verdict"], *result["experts"].values()]
    text = "\n".join([*parts, *(one["text"] + "\n" for one in decisions)])
    write_text(folder / "headroom.md", text)
    write_json(folder / "headroom.json", result, indent=2)
    console.print(text, soft_wrap=True, highlight=False)
    console.print(f"written: {folder / 'headroom.md'} and headroom.json")
