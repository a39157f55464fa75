"""Collect results of ``damex headroom``, and write the tables of the pages from JSON.

    python docs/results/update.py WORK_DIR OUT.json   # scores per seed of a ladder
    python docs/results/update.py                     # tables and figures of the pages

A page marks a table by ``<!-- table NAME -->`` and ``<!-- end -->``. NAME is one of
``COMPUTED``, or an entry of ``tables.json``. A cell of that file is text, or a formula
over the scores per seed in ``experts.json``:

    =MIXTURE ARM                  mean AP and its deviation
    =MIXTURE ARM - BASE           paired difference in mean AP, with its 95% interval
    =MIXTURE ARM seeds 1 2 3      of these seeds alone; also after a difference
    =MIXTURE verdict              of ``damex headroom``

Scores that were not kept per seed (AP50, pooled AP, arms of the parts) are text.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from damex.engine.summary import markdown
from damex.headroom.report import cell, dot_plot
from damex.headroom.verdict import judge, paired_difference, spread

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FORMULA = re.compile(r"=(\S+) (\S+)(?: - (\S+))?(?: seeds ([\d ]+))?")
VERDICTS = {"yes": "can help", "no": "not shown to help", "undecided": "undecided"}
ARMS = {
    "dense": "joint detector",
    "single": "a detector per dataset, as many images",
    "dense_lr2": "joint, twice the learning rate",
    "partitioned": "a head per dataset, dataset given",
    "partitioned_guessed": "a head per dataset, dataset guessed",
    "damex": "`damex`: the paper's experts",
    "damex_best": "`damex_best`: the default recipe",
}
FASTER = {
    "dense": "the template before",
    "dense_lr2": "twice the learning rate",
    "dense_class2": "and twice the classification loss: the template now",
    "dense_class2_dn150": "and 150 denoising queries, 480 iterations",
    "damex_best_class2": "`damex_best` with the settings of the template now",
}
BACKBONE = {
    "dense": "joint detector",
    "dense_lr2": "joint, twice the learning rate",
    "shared_adapters": "adapters shared by all datasets",
    "dataset_adapters_told": "adapters of each dataset, dataset given",
    "scale_and_shift_told": "... a scale and a shift alone",
    "rank_32_told": "... of rank 32",
    "all_stages_told": "... behind all blocks, also the frozen ones",
    "damex_best": "`damex_best`, no adapters",
    "dataset_adapters_told_and_damex_best": "`damex_best` and adapters of each dataset",
}
WORLDS = ("dense", "dense_lr2", "damex_best")  # rows of a figure


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


def _arms(
    shown: Mapping[str, str], file: str = "seven_datasets.json"
) -> dict[str, dict[str, Any]]:
    """Scores on the seven datasets of the shown arms that were run."""
    found = json.loads((HERE / file).read_text("utf-8"))["arms"]
    return {arm: found[arm] for arm in shown if arm in found}


def seven_datasets(
    shown: Mapping[str, str] = ARMS,
    file: str = "seven_datasets.json",
    bases: Sequence[tuple[str, str]] = (("dense", "joint"),),
) -> str:
    """Arms on the seven datasets: means, differences to `bases`, time and size."""
    arms = _arms(shown, file)
    minus = [f"minus {name} [95%]" for _, name in bases]
    header = ["", "mean AP", "mean AP50", *minus, "pooled AP"]
    lines = []
    for name, arm in arms.items():
        pairs = [
            None
            if name == base
            else paired_difference(arm["mean_ap"], arms[base]["mean_ap"])
            for base, _ in bases
        ]
        scores = [_scores(arm["mean_ap"]), spread(arm["mean_ap50"])]
        seconds = arm.get("seconds_per_iteration")
        more = [seconds and f"{seconds:.2f}", _millions(arm.get("parameters"))]
        columns = [*scores, *pairs, spread(arm["pooled_ap"]), *more]
        lines.append([shown[name], *map(cell, columns)])
    return markdown([*header, "s / iteration", "parameters"], lines)


def seven_datasets_by_dataset(
    shown: Mapping[str, str] = ARMS, file: str = "seven_datasets.json"
) -> str:
    """AP of each of the seven datasets."""
    arms = _arms(shown, file)
    names = list(next(iter(arms.values()))["datasets"])
    lines = [
        [shown[name], *(cell(spread(arm["datasets"][d])) for d in names)]
        for name, arm in arms.items()
    ]
    return markdown(["AP", *(name.replace("_", " ") for name in names)], lines)


def experts_twice() -> str:
    """`damex_best` and dense with the template's settings, measured twice."""
    first, second = _arms(FASTER), _arms(BACKBONE, "backbone.json")
    dense = [first["dense_class2"]["mean_ap"], second["dense"]["mean_ap"]]
    best = [first["damex_best_class2"]["mean_ap"], second["damex_best"]["mean_ap"]]
    later = "[later runs](#adapters-in-the-backbone)"
    rows = {
        "the runs above": (dense[0], best[0]),
        later: (dense[1], best[1]),
        "all six pairs": ([*dense[0], *dense[1]], [*best[0], *best[1]]),
    }
    lines = [
        [row, *map(cell, (spread(of), spread(to), paired_difference(to, of)))]
        for row, (of, to) in rows.items()
    ]
    return markdown(["mean AP", "dense", "`damex_best`", "difference [95%]"], lines)


def front() -> str:
    """The four dense rivals and experts, a mixture per row, for the README."""
    columns_of_page, rows = _kept("front")
    arms = _arms(ARMS)
    columns = ("dense", "dense_lr2", "partitioned", "damex_best")
    means = {name: arms[name]["mean_ap"] for name in columns if name in arms}
    best = max(("dense", "dense_lr2"), key=lambda one: _mean(means.get(one)))
    pair = paired_difference(means["damex_best"], means[best])
    cells = [_scores(means[name]) if name in means else "-" for name in columns]
    row = ["seven small real datasets, 600 iterations, three seeds", *cells, cell(pair)]
    return markdown(columns_of_page, [*rows, row])


def _scores(scores: Sequence[float | None]) -> str:
    """Mean and deviation, with the number of seeds if some are missing."""
    known = sum(one is not None for one in scores)
    seeds = "1 seed" if known == 1 else f"{known} seeds"
    return cell(spread(scores)) + f" ({seeds})" * (known < len(scores))


def _mean(scores: Sequence[float | None] | None) -> float:
    known = [one for one in scores or () if one is not None]
    return statistics.fmean(known) if known else -1.0


def _millions(count: int | None) -> str | None:
    return None if count is None else f"{count / 1e6:.2f} M"


def lost_ap() -> str:
    """Where the template's detector loses AP, mean over the seeds."""
    rows = json.loads((HERE / "lost_ap.json").read_text("utf-8"))
    columns = list(rows["mean"])
    lines = [
        [
            name.replace("_", " "),
            *(
                f"{statistics.fmean(row[key]):.{1 if 'side' in key else 3}f}"
                for key in columns
            ),
        ]
        for name, row in rows.items()
    ]
    return markdown(["", *columns], lines)


COMPUTED: dict[str, Callable[[], str]] = {
    "backbone": partial(
        seven_datasets,
        BACKBONE,
        "backbone.json",
        [("dense", "joint"), ("shared_adapters", "shared adapters")],
    ),
    "backbone-by-dataset": partial(
        seven_datasets_by_dataset, BACKBONE, "backbone.json"
    ),
    "experts-twice": experts_twice,
    "front": front,
    "faster-template": partial(seven_datasets, FASTER),
    "faster-template-by-dataset": partial(seven_datasets_by_dataset, FASTER),
    "lost-ap": lost_ap,
    "seven-datasets": seven_datasets,
    "seven-datasets-by-dataset": seven_datasets_by_dataset,
}


def table(name: str) -> str:
    """The Markdown of a table."""
    if name in COMPUTED:
        return COMPUTED[name]()
    return markdown(*_kept(name))


@cache
def _experts() -> dict[str, Any]:
    return json.loads((HERE / "experts.json").read_text("utf-8"))


def _kept(name: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows of an entry of ``tables.json``, with its formulas computed."""
    kept = json.loads((HERE / "tables.json").read_text("utf-8"))[name]
    return kept["columns"], [[*map(computed, row)] for row in kept["rows"]]


def computed(text: str) -> str:
    """The value of a formula; other text is unchanged."""
    if not text.startswith("="):
        return text
    found = FORMULA.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a formula; see the top of this file.")
    mixture, arm, base, numbers = found.groups()
    experiment = _experts()[mixture]
    scores = {name: one["mean_ap"] for name, one in experiment["arms"].items()}
    if arm == "verdict":
        verdict = judge(scores)
        return cell(verdict and VERDICTS[verdict.answer])
    if numbers:
        places = [experiment["seeds"].index(int(seed)) for seed in numbers.split()]
        scores = {name: [of[i] for i in places] for name, of in scores.items()}
    if base:
        return cell(paired_difference(scores[arm], scores[base]))
    return cell(spread(scores[arm]))


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
    seven, worlds = _arms(ARMS), _experts()["worlds-8_conflicting"]["arms"]
    figures = {
        "seven-datasets": {ARMS[name]: one for name, one in seven.items()},
        "headroom-worlds": {name: worlds[name] for name in WORLDS},
    }
    for name, arms in figures.items():
        dots = {arm.replace("`", ""): one["mean_ap"] for arm, one in arms.items()}
        figure = dot_plot(dots, score="mean AP")
        figure.savefig(ROOT / f"docs/images/{name}.png", dpi=120)


if __name__ == "__main__":
    main(sys.argv[1:])
