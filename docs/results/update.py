"""Collect results of ``damex headroom``, and write the tables of the pages from JSON.

    python docs/results/update.py WORK_DIR OUT.json   # scores per seed of a ladder
    python docs/results/update.py                     # tables and figures of the pages

A page marks a table by ``<!-- table NAME -->`` and ``<!-- end -->``; NAME is an entry
of ``tables.json``, whose runs were not kept seed by seed, or a function below.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from damex.engine.summary import markdown
from damex.headroom.report import cell, dot_plot
from damex.headroom.verdict import paired_difference, spread

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
ARMS = {
    "single": "a detector per dataset, as many images",
    "dense": "joint detector",
    "dense_lr2": "joint, twice the learning rate",
    "partitioned": "a head per dataset, dataset given",
    "partitioned_guessed": "a head per dataset, dataset guessed",
    "damex": "`damex`: the paper's experts",
    "damex_best": "`damex_best`: the default recipe",
}


def collect(folder: Path) -> dict[str, Any]:
    """Scores of every arm, one per seed, from the runs of ``damex headroom``.

    Returns:
        ``seeds``, ``iterations`` and ``arms``, with ``mean_ap``, ``mean_ap50``,
        ``pooled_ap`` and ``datasets`` per seed, and, where known, the median of
        ``seconds_per_iteration`` and ``parameters``.
    """
    report = json.loads((folder / "headroom.json").read_text("utf-8"))
    arms = {}
    for name, row in report["rungs"].items():
        runs = sorted(folder.glob(f"{name}/seed*/summary.json"))
        if name == "single":
            runs = sorted(folder.glob("single_*/seed*/summary.json"))
        summaries = [json.loads(path.read_text("utf-8")) for path in runs]
        arms[name] = dict(
            mean_ap=row["mean_ap"],
            mean_ap50=row["mean_ap50"],
            pooled_ap=row["pooled_ap"],
            datasets={key: one["ap"] for key, one in row["datasets"].items()},
            seconds_per_iteration=_seconds(summaries),
            parameters=_parameters(folder, name),
        )
    first = json.loads(next(folder.glob("dense/seed*/summary.json")).read_text("utf-8"))
    return dict(seeds=report["seeds"], iterations=first["iterations"], arms=arms)


def _seconds(summaries: Iterable[Mapping[str, Any]]) -> float | None:
    """Median over runs of the seconds of an iteration."""
    found = [
        one["train_seconds"] / one["trained_iterations"]
        for one in summaries
        if one.get("trained_iterations")
    ]
    return round(statistics.median(found), 3) if found else None


def _parameters(folder: Path, name: str) -> int:
    """Parameters of the trained detector, or of all detectors of single datasets."""
    from mmdet.registry import MODELS
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    from damex.engine.config import resolve_config

    init_default_scope("mmdet")
    pattern = "single_*/config.py" if name == "single" else f"{name}/config.py"
    total = 0
    for path in sorted(folder.glob(pattern)):
        detector = MODELS.build(resolve_config(Config.fromfile(path))["model"])
        total += sum(one.numel() for one in detector.parameters())
    return total


def _arms(name: str) -> dict[str, dict[str, Any]]:
    path = HERE / f"{name}.json"
    found = json.loads(path.read_text("utf-8"))["arms"] if path.is_file() else {}
    order = [*ARMS, *sorted({*found} - {*ARMS})]
    return {arm: found[arm] for arm in order if arm in found}


def seven_datasets() -> str:
    """Arms on the seven datasets: means, pairs, time and size."""
    arms = _arms("seven_datasets")
    header = ["", "mean AP", "mean AP50", "minus joint [95%]", "pooled AP"]
    lines = []
    for name, arm in arms.items():
        pair = None
        if name != "dense":
            pair = paired_difference(arm["mean_ap"], arms["dense"]["mean_ap"])
        scores = [_scores(arm["mean_ap"]), spread(arm["mean_ap50"])]
        more = [arm.get("seconds_per_iteration"), _millions(arm.get("parameters"))]
        columns = [*scores, pair, spread(arm["pooled_ap"]), *more]
        lines.append([ARMS.get(name, name), *map(cell, columns)])
    return markdown([*header, "s / iteration", "parameters"], lines)


def seven_datasets_by_dataset() -> str:
    """AP of each of the seven datasets."""
    arms = _arms("seven_datasets")
    names = list(next(iter(arms.values()))["datasets"])
    lines = [
        [ARMS.get(name, name), *(cell(spread(arm["datasets"][d])) for d in names)]
        for name, arm in arms.items()
    ]
    return markdown(["AP", *(name.replace("_", " ") for name in names)], lines)


def front() -> str:
    """The four dense rivals and experts, a mixture per row, for the README."""
    kept = json.loads((HERE / "tables.json").read_text("utf-8"))["front"]
    arms = _arms("seven_datasets")
    columns = ("dense", "dense_lr2", "partitioned", "damex_best")
    means = {name: arms[name]["mean_ap"] for name in columns if name in arms}
    best = max(("dense", "dense_lr2"), key=lambda one: _mean(means.get(one)))
    pair = paired_difference(means["damex_best"], means[best])
    cells = [_scores(means[name]) if name in means else "-" for name in columns]
    row = ["seven small real datasets, 600 iterations, three seeds", *cells, cell(pair)]
    return markdown(kept["columns"], [*kept["rows"], row])


def _scores(scores: Sequence[float | None]) -> str:
    """Mean and deviation, with the number of seeds if some are missing."""
    known = sum(one is not None for one in scores)
    return cell(spread(scores)) + f" ({known} seeds)" * (known < len(scores))


def _mean(scores: Sequence[float | None] | None) -> float:
    known = [one for one in scores or () if one is not None]
    return statistics.fmean(known) if known else -1.0


def _millions(count: int | None) -> str | None:
    return None if count is None else f"{count / 1e6:.2f} M"


COMPUTED: dict[str, Callable[[], str]] = {
    "front": front,
    "seven-datasets": seven_datasets,
    "seven-datasets-by-dataset": seven_datasets_by_dataset,
}


def table(name: str) -> str:
    """The Markdown of a table."""
    if name in COMPUTED:
        return COMPUTED[name]()
    kept = json.loads((HERE / "tables.json").read_text("utf-8"))[name]
    return markdown(kept["columns"], kept["rows"])


def with_tables(text: str) -> str:
    """A page with the tables that it marks."""
    return TABLE.sub(lambda m: f"{m[1]}\n{table(m[2]).strip()}\n\n{m[3]}", text)


def main(arguments: Sequence[str]) -> None:
    """Collect runs if they are named; else write pages and figures."""
    if arguments:
        folder, out = map(Path, arguments)
        text = json.dumps(collect(folder), indent=1) + "\n"
        out.write_text(text, encoding="utf-8")
        return
    for page in PAGES:
        text = page.read_text("utf-8")
        if (new := with_tables(text)) != text:
            page.write_text(new, encoding="utf-8")
    if arms := _arms("seven_datasets"):
        dots = {ARMS.get(name, name): arm["mean_ap"] for name, arm in arms.items()}
        figure = dot_plot(dots, score="mean AP")
        figure.savefig(ROOT / "docs/images/seven-datasets.png", dpi=120)


if __name__ == "__main__":
    main(sys.argv[1:])
