"""Write the tables of the pages from the scores per seed in the JSON files here.

    python docs/results/update.py                     # tables and figures of the pages
    python docs/results/update.py WORK_DIR OUT.json   # scores of ``damex headroom``

A page marks a table by ``<!-- table NAME -->`` and ``<!-- end -->``; ``TABLES`` has a
function for each NAME. Scores that were not kept per seed have a mean and a deviation.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from damex.engine.summary import markdown
from damex.workbench.headroom.command import cell
from damex.workbench.headroom.verdict import Spread, decide, paired_difference, spread

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VERDICTS = {"yes": "can help", "no": "not shown to help", "undecided": "undecided"}
SEVEN = {
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

Arms = Mapping[str, Mapping[str, Any]]


def arms_of(file: str, experiment: str | None = None) -> Arms:
    """Scores per seed by arm, of a file or of an experiment in it."""
    content = json.loads((HERE / file).read_text("utf-8"))
    return (content if experiment is None else content[experiment])["arms"]


experts = partial(arms_of, "experts.json")


def mean(arm: Mapping[str, Any], score: str = "mean_ap") -> str:
    """Mean and deviation, with the number of seeds if some are missing."""
    if score not in arm:
        value = arm.get(f"{score}_mean")
        return "" if value is None else str(Spread(value, arm[f"{score}_deviation"]))
    known = sum(one is not None for one in arm[score])
    seeds = "1 seed" if known == 1 else f"{known} seeds"
    return cell(spread(arm[score])) + f" ({seeds})" * (known < len(arm[score]))


def gain(arms: Arms, name: str, base: str) -> str:
    """Paired difference in mean AP, with its 95% interval; ``-`` for the base."""
    if name == base:
        return "-"
    return cell(paired_difference(arms[name]["mean_ap"], arms[base]["mean_ap"]))


def of_seeds(arms: Arms, *places: int) -> Arms:
    """The scores of some seeds, named by their places in the lists."""
    return {
        name: dict(mean_ap=[arm["mean_ap"][place] for place in places])
        for name, arm in arms.items()
        if "mean_ap" in arm
    }


# ---- the tables ----


def front() -> str:
    """Dense rivals and experts, a mixture per row, for the README."""
    rows = {
        "eight synthetic datasets, names conflict, 600 iterations, five seeds": experts(
            "worlds-8_conflicting"
        ),
        "the same, names agree, three seeds": experts("worlds-8_agreeing"),
        "seven small real datasets, 600 iterations, three seeds": arms_of(
            "seven_datasets.json"
        ),
    }
    columns = ("dense", "dense_lr2", "partitioned", "damex_best")
    lines = []
    for mixture, arms in rows.items():
        scores = [mean(arms[name]) if name in arms else "-" for name in columns]
        better = max(columns[:2], key=lambda name: spread(arms[name]["mean_ap"]).mean)
        lines.append([mixture, *scores, gain(arms, "damex_best", better)])
    header = ["mixture", "dense", "dense, learning rate x 2", "a head per dataset"]
    last = ["experts", "experts minus the better dense [95%]"]
    return markdown([*header, *last], lines)


def real(file: str, shown: Mapping[str, str], bases: Mapping[str, str]) -> str:
    """Arms on the seven datasets: means, differences to `bases`, time and size."""
    arms = arms_of(file)
    minus = [f"minus {base} [95%]" for base in bases.values()]
    header = ["", "mean AP", "mean AP50", *minus, "pooled AP"]
    lines = []
    for name in filter(arms.__contains__, shown):
        arm = arms[name]
        seconds, count = arm.get("seconds_per_iteration"), arm.get("parameters")
        lines.append(
            [
                *(shown[name], mean(arm), cell(spread(arm["mean_ap50"]))),
                *(gain(arms, name, base) for base in bases),
                cell(spread(arm["pooled_ap"])),
                "-" if seconds is None else f"{seconds:.2f}",
                "-" if count is None else f"{count / 1e6:.2f} M",
            ]
        )
    return markdown([*header, "s / iteration", "parameters"], lines)


def real_by_dataset(file: str, shown: Mapping[str, str]) -> str:
    """AP of each of the seven datasets."""
    arms = arms_of(file)
    names = list(arms["dense"]["datasets"])
    lines = [
        [shown[name], *(cell(spread(arms[name]["datasets"][d])) for d in names)]
        for name in filter(arms.__contains__, shown)
    ]
    return markdown(["AP", *(name.replace("_", " ") for name in names)], lines)


def experts_twice() -> str:
    """`damex_best` and dense with the template's settings, measured twice."""
    first, second = arms_of("seven_datasets.json"), arms_of("backbone.json")
    dense = [first["dense_class2"]["mean_ap"], second["dense"]["mean_ap"]]
    best = [first["damex_best_class2"]["mean_ap"], second["damex_best"]["mean_ap"]]
    rows = {
        "the runs above": (dense[0], best[0]),
        "[later runs](#adapters-in-the-backbone)": (dense[1], best[1]),
        "all six pairs": ([*dense[0], *dense[1]], [*best[0], *best[1]]),
    }
    lines = [
        [row, *map(cell, (spread(of), spread(to), paired_difference(to, of)))]
        for row, (of, to) in rows.items()
    ]
    return markdown(["mean AP", "dense", "`damex_best`", "difference [95%]"], lines)


def lost_ap() -> str:
    """Where the template's detector loses AP, mean over the seeds."""
    rows = json.loads((HERE / "lost_ap.json").read_text("utf-8"))
    digits = {key: 1 if "side" in key else 3 for key in rows["mean"]}
    lines = [
        [
            name.replace("_", " "),
            *(f"{statistics.fmean(row[key]):.{digits[key]}f}" for key in digits),
        ]
        for name, row in rows.items()
    ]
    return markdown(["", *digits], lines)


def worlds() -> str:
    """All arms on the eight worlds with conflicting names."""
    arms = experts("worlds-8_conflicting")
    names = ("dense", "dense_lr2", "wide_decoder", "wide_encoder", "single")
    lines = [
        [
            *(
                f"`{name}`",
                mean(arms[name], "mean_ap50"),
                cell(spread(arms[name]["mean_ap"])),
            ),
            *(gain(arms, name, "dense_lr2"), mean(arms[name], "pooled_ap")),
        ]
        for name in (*names, "oracle", "damex_best")
    ]
    minus = "minus `dense_lr2`, mean AP [95%]"
    return markdown(["arm", "mean AP50", "mean AP", minus, "pooled AP"], lines)


def worlds_conditions() -> str:
    """Dense and experts on variants of the worlds, and the verdict."""
    rows = {
        "names conflict (five seeds)": "worlds-8_conflicting",
        "names agree": "worlds-8_agreeing",
        "two worlds instead of eight": "worlds-2_conflicting",
        "FFNs of 256 hidden units": "worlds-8_conflicting_wide",
        "a tenth of the training images": "worlds-8_few_images",
    }
    lines = []
    for row, experiment in rows.items():
        arms = experts(experiment)
        scores = {
            name: arm["mean_ap"] for name, arm in arms.items() if "mean_ap" in arm
        }
        verdict = decide(scores)
        words = "-" if verdict is None else VERDICTS[verdict.answer]
        lines.append([row, *pair_of(arms), words])
    return markdown(["eight worlds, 600 iterations", *PAIR, "verdict"], lines)


PAIR = ("`dense`", "`damex_best`", "`damex_best` minus `dense` [95%]")


def pair_of(arms: Arms) -> list[str]:
    """The cells of ``PAIR``."""
    names = ("dense", "damex_best")
    return [*(mean(arms[name]) for name in names), gain(arms, "damex_best", "dense")]


def worlds_length() -> str:
    """Dense and experts by the length of training."""
    rows = {
        ("600", "1 to 5"): "worlds-8_conflicting",
        ("1,200", "1 to 3"): "worlds-8_conflicting_1200_iterations",
        ("2,400", "1"): "worlds-8_conflicting_2400_iterations",
    }
    lines = [[*row, *pair_of(experts(name))] for row, name in rows.items()]
    return markdown(["iterations", "seeds", *PAIR], lines)


def toy() -> str:
    """Dense and experts on the quick start; seed 0 was added afterwards."""
    arms = experts("toy_quick_start")
    columns = [pair_of(of_seeds(arms, 1, 2, 3)), pair_of(of_seeds(arms, 0))]
    names = ("`dense`", "`damex_best`", "difference, paired [95%]")
    lines = zip(names, *columns, strict=True)
    return markdown(["", "mean AP, seeds 1 to 3", "seed 0"], list(map(list, lines)))


JOINT = {"dense": "joint"}
TABLES = {
    "front": front,
    "seven-datasets": partial(real, "seven_datasets.json", SEVEN, JOINT),
    "seven-datasets-by-dataset": partial(real_by_dataset, "seven_datasets.json", SEVEN),
    "faster-template": partial(real, "seven_datasets.json", FASTER, JOINT),
    "faster-template-by-dataset": partial(
        real_by_dataset, "seven_datasets.json", FASTER
    ),
    "backbone": partial(
        *(real, "backbone.json", BACKBONE),
        {**JOINT, "shared_adapters": "shared adapters"},
    ),
    "backbone-by-dataset": partial(real_by_dataset, "backbone.json", BACKBONE),
    "experts-twice": experts_twice,
    "lost-ap": lost_ap,
    "worlds": worlds,
    "worlds-conditions": worlds_conditions,
    "worlds-length": worlds_length,
    "toy": toy,
}


def with_tables(text: str) -> str:
    """A page with the tables that it marks."""
    return TABLE.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]().strip()}\n\n{m[3]}", text)


# ---- figures, and the scores of new runs ----


def dot_plot(rows: Mapping[str, Sequence[float | None]]) -> Figure:
    """Mean AP: a dot per seed, a bar at the mean, a band of the first row's spread."""
    known = {row: [one for one in of if one is not None] for row, of in rows.items()}
    figure = Figure(figsize=(7.5, 1.2 + 0.3 * len(known)), layout="constrained")
    axes = figure.subplots()
    for place, values in enumerate(known.values()):
        axes.plot(values, [place] * len(values), "o", color="#2a6f97", alpha=0.6)
        axes.plot(statistics.fmean(values), place, "|", color="black", markersize=14)
    first = next(iter(known.values()))
    center, reach = statistics.fmean(first), statistics.stdev(first)
    axes.axvline(center, color="#b2603a", linewidth=1)
    axes.axvspan(center - reach, center + reach, color="#b2603a", alpha=0.15)
    axes.set_yticks(range(len(known)), list(known))
    axes.set_ylim(len(known) - 0.5, -0.5)  # the first row at the top
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("mean AP")
    note = "dots: seeds; bars: their mean; band: mean and deviation of the first row"
    figure.supxlabel(note, fontsize="small")
    return figure


def collect(folder: Path) -> dict[str, Any]:
    """Scores of every arm, one per seed, and the median seconds of an iteration."""
    report = json.loads((folder / "headroom.json").read_text("utf-8"))
    arms = {}
    for name, row in report["rows"].items():
        pattern = "single_*" if name == "single" else name
        seconds = [
            run["train_seconds"] / run["trained_iterations"]
            for path in folder.glob(f"{pattern}/seed*/summary.json")
            if (run := json.loads(path.read_text("utf-8"))).get("trained_iterations")
        ]
        arms[name] = {key: row[key] for key in ("mean_ap", "mean_ap50", "pooled_ap")}
        arms[name]["datasets"] = {
            key: one["ap"] for key, one in row["datasets"].items()
        }
        if seconds:
            arms[name]["seconds_per_iteration"] = round(statistics.median(seconds), 3)
    return dict(seeds=report["seeds"], arms=arms)


def main(arguments: Sequence[str]) -> None:
    """Collect runs if they are named; else write pages and figures."""
    if arguments:
        folder, out = map(Path, arguments)
        out.write_text(json.dumps(collect(folder), indent=1) + "\n", encoding="utf-8")
        return
    for page in PAGES:
        text = page.read_text("utf-8")
        if (new := with_tables(text)) != text:
            page.write_text(new, encoding="utf-8")
    seven, conflicting = arms_of("seven_datasets.json"), experts("worlds-8_conflicting")
    figures = {
        "seven-datasets": {
            SEVEN[name].replace("`", ""): seven[name]["mean_ap"]
            for name in filter(seven.__contains__, SEVEN)
        },
        "headroom-worlds": {
            name: conflicting[name]["mean_ap"]
            for name in ("dense", "dense_lr2", "damex_best")
        },
    }
    for name, rows in figures.items():
        dot_plot(rows).savefig(ROOT / f"docs/images/{name}.png", dpi=120)


if __name__ == "__main__":
    main(sys.argv[1:])
