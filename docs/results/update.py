"""Write the tables and figures of the pages from the JSON files with scores.

    python docs/results/update.py

A page marks a table by ``<!-- table NAME -->`` and ``<!-- end -->``; ``TABLES`` has a
function for each NAME. ``collect.py`` writes the JSON files.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scores import (
    FEWEST_SEEDS,
    Arms,
    arms_of,
    gain,
    mean,
    share_of_gap,
    stored,
    verdicts,
)

from damex.engine.summary import markdown
from damex.workbench.headroom.verdict import spread

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
ARMS = {
    "dense": "one detector",
    "single": "one per dataset, same training in all",
    "longer_dense": "one detector, 2 x training",
    "longer_single": "one per dataset, 2 x training in all",
    "longer_damex_best": "`damex_best`, 2 x training",
    "dense_full": "one detector, 7 x training",
    "template_full": "the template with windows, 7 x training",
    "template_dense_full": "the same without experts, 7 x training",
    "single_full": "one per dataset, 7 x training",
    "template_single_full": "one per dataset with its windows, 7 x training",
    "partitioned": "one detector, a head per dataset",
    "damex": "`damex`: the paper's experts",
    "damex_best": "`damex_best`: the default experts",
}

# Fewer than five seeds, or after the design: the table gives them no verdict.
ADDED = (
    *("dense_full", "template_full", "template_dense_full", "template_single_full"),
    *("longer_dense", "longer_single", "longer_damex_best"),
)

Scores = Sequence[float]


# ---- the tables ----


def equal(name: str) -> str:
    """The arm of one detector without experts that reads as many images."""
    if name.startswith("longer_"):
        return "longer_dense"
    return "dense_full" if name.endswith("_full") else "dense"


def one_or_seven() -> str:
    """One detector or a detector per dataset: AP and cost, for README."""
    arms, cost = arms_of("one_or_seven"), stored("cost.json")
    lines = []
    for name in cost["images"]:
        number = cost["per_dataset"] if "single" in name else cost["joint"]
        lines.append(
            [
                ARMS[name],
                mean(arms[name]),
                gain(arms, name, equal(name)),
                str(len(arms[name]["mean_ap"])),
                f"{cost['images'][name]:,}",
                f"{number['parameters'] / 1e6:.1f} M",
                f"{number['megabytes']:.0f} MB",
                f"{number['ms_known']:.0f} / {number['ms_unknown']:.0f}",
            ]
        )
    gained = "minus one detector of equal training [95%]"
    header = ["", "mean AP", gained, "seeds", "images read"]
    costs = ["parameters", "on disk", "ms per image: dataset known / unknown"]
    return markdown([*header, *costs], lines)


def experts_in_short() -> str:
    """Dense, a head per dataset and experts, a mixture per row, for README."""
    eight = "eight synthetic datasets, names conflict, 600 iterations, 128 px"
    rows = {
        "seven small real datasets, 600 iterations, 256 px": arms_of("one_or_seven"),
        eight: worlds_of("eight"),
        "the same, names agree": worlds_of("agreeing"),
    }
    columns = ("dense", "partitioned", "damex", "damex_best")
    lines = []
    for mixture, arms in rows.items():
        scores = [mean(arms.get(name, {})) for name in columns]
        lines.append([mixture, *scores, gain(arms, "damex_best", "dense")])
    header = ["mean AP", "dense", "a head per dataset", "the paper's `damex`"]
    last = ["`damex_best`", "`damex_best` minus dense [95%]"]
    return markdown([*header, *last], lines)


def real() -> str:
    """All arms on the seven datasets, told the dataset of an image and not told."""
    arms = arms_of("one_or_seven")
    tested = {name: arms[name] for name in arms if name not in ADDED}
    places = verdicts(tested, "dense")  # of the arms that were predicted
    lines = [
        [
            ARMS[name],
            str(len(arms[name]["mean_ap"])),
            mean(arms[name]),
            gain(arms, name, equal(name)),
            places.get(name, "-"),
            *(mean(arms[name], key) for key in ("mean_ap50", "not_told")),
            "-" if name == "partitioned" else mean(arms[name], "pooled_ap"),
        ]
        for name in filter(arms.__contains__, ARMS)
    ]
    header = ["", "seeds", "mean AP", "minus one detector of equal training [95%]"]
    last = ["place", "mean AP50", "mean AP, not told", "pooled AP"]
    return markdown([*header, *last], lines)


def by_dataset(
    arms: Arms, labels: Mapping[str, str], *, score: str = "datasets"
) -> str:
    """AP of each dataset; a row per arm, in the order of its labels."""
    names = list(next(iter(arms.values()))["datasets"])
    lines = [
        [labels[name], *(str(spread(arms[name][score][d])) for d in names)]
        for name in filter(arms.__contains__, labels)
    ]
    header = "AP50" if score == "datasets_ap50" else "AP"
    return markdown([header, *(name.replace("_", " ") for name in names)], lines)


DETECTORS = {
    "DINO, `tiny` with `image_balance=0` and AdamW": ("one_or_seven", "DINO"),
    "RT-DETRv2, `rtdetr-v2-tiny`": ("rt_detr_v2", "RT-DETRv2"),
}


def detectors() -> str:
    """Two dense detectors that train for the same time, on the seven datasets."""
    arms = {name: arms_of(file)["dense"] for name, (file, _) in DETECTORS.items()}
    base, cost = next(iter(arms)), stored("cost.json")["detectors"]
    lines = []
    for name, (_, key) in DETECTORS.items():
        torch, onnx = cost[key]["ms"], cost[key]["ms_onnx"]
        lines.append(
            [
                name,
                str(len(arms[name]["mean_ap"])),
                mean(arms[name]),
                gain(arms, name, base),
                mean(arms[name], "mean_ap50"),
                mean(arms[name], "pooled_ap"),
                f"{cost[key]['parameters'] / 1e6:.1f} M",
                f"{torch} / {onnx}",
            ]
        )
    header = ["", "seeds", "mean AP", "minus DINO [95%]", "mean AP50", "pooled AP"]
    return markdown([*header, "parameters", "ms per image, torch / ONNX"], lines)


def detectors_by_dataset() -> str:
    """AP of each of the seven datasets by detector."""
    arms = {name: arms_of(file)["dense"] for name, (file, _) in DETECTORS.items()}
    return by_dataset(arms, {name: name for name in DETECTORS})


def full_price() -> str:
    """Long trainings of one detector and of one per dataset, by seed."""
    runs = stored("one_or_seven.json")["runs"]
    found = {(one["arm"], one["seed"]): one["datasets"] for one in runs}
    arms = ("dense", "dense_full", "single_full")
    lines = [
        [
            name.replace("_", " "),
            str(seed),
            *(f"{found[one, seed][name]:.3f}" for one in arms),
        ]
        for arm, seed in found
        if arm == "single_full"
        for name in found[arm, seed]
    ]
    header = ["AP", "seed", "one detector, 600 iterations", "4,200 iterations"]
    return markdown([*header, "one for this dataset, 600 iterations"], lines)


TILES = {"dense": "whole images", "tile": "windows for three of the seven"}
BALANCED = {
    "dense": "objects weigh alike, `image_balance=0`",
    "root": "`image_balance=0.5`",
    "image": "images weigh alike, `image_balance=1`",
}


BOTH = {
    "dense": "windows, `image_balance=0`",
    "root_tile": "windows, `image_balance=0.5`",
}
WITH_EXPERTS = {
    "dense": "`damex_best`, `image_balance=0`",
    "root_best": "`damex_best`, `image_balance=0.5`",
    "root": "no experts, `image_balance=0.5`",
}


DRIFT = "Muon, experts do not rest"
MUON = {
    "root": "no experts, AdamW",
    "root_muon": "no experts, Muon",
    "root_best": "`damex_best`, AdamW",
    "root_best_muon_drift": f"`damex_best`, {DRIFT}",
}


# Where the arm lies that others are compared with: file and name.
WHOLE, TILED = ("tiles", "dense"), ("tiles", "tile")
EXPERTS = ("one_or_seven", "damex_best")


def balanced(file: str, arm: str) -> Arms:
    """Arms of images that weigh alike; as ``dense``, one of another experiment."""
    return {"dense": arms_of(file)[arm], **arms_of("balanced")}


def variants(
    arms: Arms,
    labels: Mapping[str, str],
    words: str,
    base_of: Callable[[str], str] = lambda name: "dense",
) -> str:
    """A row per arm, compared with its base, which has some words in the header."""
    lines = [
        [
            labels[name],
            str(len(arms[name]["mean_ap"])),
            mean(arms[name]),
            gain(arms, name, base_of(name)),
            *(mean(arms[name], key) for key in ("mean_ap50", "pooled_ap")),
        ]
        for name in labels
    ]
    header = ["", "seeds", "mean AP", f"minus {words} [95%]", "mean AP50"]
    return markdown([*header, "pooled AP"], lines)


LONGER_MUON = {
    "longer_best": "`damex_best`, AdamW",
    "longer_best_muon": "`damex_best`, Muon",
    "longer_best_muon_drift": f"`damex_best`, {DRIFT}",
}


TUNED = {
    "tuned_muon": "as in the template",
    "tuned_muon_lr05": "learning rate 0.0008, not 0.0016",
    "tuned_muon_lr2": "learning rate 0.0032",
    "tuned_muon_backbone": "backbone at 0.4 of it, not 0.1",
    "tuned_muon_cls1": "classification weight 1, not 2",
    "tuned_muon_many": "four tokens per object",
}


def tuned() -> str:
    """Changes of the template, each with the seeds that it ran with."""
    return variants(arms_of("muon"), TUNED, "the first row", lambda _: "tuned_muon")


def with_muon() -> Arms:
    """Arms with ``image_balance=0.5``, trained by AdamW and in part by Muon."""
    return {**arms_of("balanced"), **arms_of("muon")}


def muon(labels: Mapping[str, str]) -> str:
    """Arms trained by Muon, each with the one trained by AdamW."""
    base = "AdamW", lambda name: name.partition("_muon")[0]
    return variants(with_muon(), labels, *base)


def tiles_by_size() -> str:
    """AP of small, medium and large objects in the original image, by dataset."""
    runs = stored("tiles.json")["runs"]
    lines = []
    for dataset in runs[0]["sizes"]:
        cells = []
        for place in range(3):  # small, medium and large
            scores = [
                [r["sizes"][dataset][place] for r in runs if r["arm"] == arm]
                for arm in TILES
            ]
            means = [
                f"{statistics.fmean(one):.3f}" for one in scores if None not in one
            ]
            cells.append(" → ".join(means) or "-")
        lines.append([dataset.replace("_", " "), *cells])
    return markdown(["AP, whole → windows", "small", "medium", "large"], lines)


SPLIT = {
    "dense": "`dense`",
    "damex_best": "`damex_best`, an expert per dataset",
    "oracle": "... with the dataset of each image given",
    "shared": "... halves share an expert: what `damex train --data` does",
    "forcing_alone": "... forced in training, no vote",
    "vote_alone": "... a vote, not forced in training",
    "damex": "`damex`",
    "vanilla": "`vanilla`",
    "partitioned": "a head per dataset",
}


def by_seed(arms: Arms, name: str) -> str:
    """Differences in mean AP to dense, a seed each."""
    pairs = zip(arms[name]["mean_ap"], arms["dense"]["mean_ap"], strict=False)
    return "-" if name == "dense" else ", ".join(f"{a - b:+.3f}" for a, b in pairs)


def split_labels() -> str:
    """All arms on halves of datasets, and how often experts of the half answer."""
    arms, runs = arms_of("split_labels"), stored("split_labels.json")["runs"]
    datasets = list(arms["dense"]["datasets"])
    lines = []
    for name in filter(arms.__contains__, SPLIT):
        routed = [
            one["routing"]["mean"]
            for one in runs
            if one["arm"] == name and "routing" in one
        ]
        lines.append(
            [
                SPLIT[name],
                mean(arms[name]),
                gain(arms, name, "dense"),
                by_seed(arms, name),
                *(
                    f"{statistics.fmean(arms[name]['datasets'][d]):.3f}"
                    for d in datasets
                ),
                f"{statistics.fmean(routed):.0%}" if routed else "-",
            ]
        )
    header = ["", "mean AP", "minus `dense` [95%]", "by seed", *datasets]
    header.append("routed to its experts")
    return markdown([one.replace("_", " ") for one in header], lines)


COMPLETING = {
    "negatives": "nothing: as one merged COCO file",
    "ignored": "`ignore_unannotated_classes=True`",
    "ignored_if_found": "`ignore_unannotated_classes=0.15`",
    "experts_negatives": "nothing, with experts of each half",
    "experts_ignored_if_found": "`0.15`, with experts of each half",
    "shared_ignored_if_found": "`0.15`, with experts that both halves share",
    "completed": "`--complete`: 300 iterations, completed, 300 more",
    "completed_from_ignored": "the same, the first 300 with `True`",
    "completed_from_ignored_if_found": "the same, the first 300 with `0.15`",
    "completed_and_ignored_if_found": "the same, all 600 with `0.15`",
    "completed_wrongly": "the same without it; all detections from 0.05 are labels",
    "completed_from_specialists": "teacher per half, completed, 600 more with `0.15`",
    "all_labels": "all labels: what could be reached",
}
LONGER = {
    "longer_negatives": COMPLETING["negatives"],
    "longer_ignored_if_found": COMPLETING["ignored_if_found"],
    "longer_completed_and_ignored_if_found": (
        "`--complete`: 600 iterations, completed, 600 more, all with `0.15`"
    ),
    "longer_ignored_if_found_twice": "the same, but nothing is completed",
    "longer_completed_anew": "completed, and all of the second half begun anew",
    "longer_all_labels": COMPLETING["all_labels"],
}


def completing(file: str = "completing", texts: Mapping[str, str] = COMPLETING) -> str:
    """Ways to handle missing labels, on halves; first nothing, last all labels."""
    arms, (base, *_, best) = arms_of(file), texts
    datasets = list(arms[base]["datasets"])
    lines = [
        [
            text,
            str(len(arms[name]["mean_ap"])),
            *(mean(arms[name], key) for key in ("mean_ap", "mean_ap50")),
            gain(arms, name, base),
            share_of_gap(arms, name, base, best),
            *(f"{statistics.fmean(arms[name]['datasets'][d]):.3f}" for d in datasets),
        ]
        for name, text in texts.items()
        if name in arms
    ]
    header = ["done about missing labels", "seeds", "mean AP", "mean AP50"]
    header += ["minus the first [95%]", "of the gap to all labels [95%]"]
    return markdown([*header, *datasets], lines)


def worlds_of(condition: str) -> Arms:
    """Scores of one kind of worlds, over the names, the dataset not given.

    Of all arms but ``partitioned`` these are those with the dataset given.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, arm in arms_of("worlds").items():
        kind, _, own = name.partition("_")
        if kind == condition:
            again = {"mean_ap": arm.get("not_told"), "told": arm["mean_ap"]}
            again["pooled_ap"] = arm.get("pooled_not_told")
            found[own] = {**arm, **{key: row for key, row in again.items() if row}}
    return found


WORLD_ARMS = ("dense", "oracle", "damex_best", "partitioned")


def worlds() -> str:
    """All arms on the eight worlds with conflicting names, in one label space."""
    arms = worlds_of("eight")
    lines = [
        [
            f"`{name}`",
            str(len(arms[name]["mean_ap"])),
            *(mean(arms[name], key) for key in ("mean_ap", "told", "pooled_ap")),
            *(gain(arms, name, base) for base in ("dense", "damex_best")),
        ]
        for name in WORLD_ARMS
    ]
    header = ["arm", "seeds", "mean AP", "mean AP, told", "pooled AP"]
    minus = ("minus `dense` [95%]", "minus `damex_best` [95%]")
    return markdown([*header, *minus], lines)


CONDITIONS = {
    "eight": "eight worlds, names conflict, 600 iterations",
    "twice": "1,200 iterations",
    "long": "2,400 iterations",
    "four": "four worlds",
    "two": "two worlds",
    "wide": "FFNs of 256 hidden units",
    "few": "a tenth of the training images",
    "agreeing": "names agree",
}


def worlds_conditions() -> str:
    """Dense, experts and a head per world: one condition of the first row changed."""
    lines = []
    for condition, text in CONDITIONS.items():
        arms = worlds_of(condition)
        names = ("dense", "damex_best", "partitioned")
        pairs = [(one, "dense") for one in names[1:]] + [("partitioned", "damex_best")]
        scores = [mean(arms.get(name, {})) for name in names]
        gains = [gain(arms, *pair) for pair in pairs]
        lines.append([text, str(len(arms["dense"]["mean_ap"])), *scores, *gains])
    arms_row = ["`dense`", "`damex_best`", "`partitioned`"]
    minus = ["`damex_best` minus `dense`", "`partitioned` minus `dense`"]
    last = "`partitioned` minus `damex_best` [95%]"
    return markdown(["", "seeds", *arms_row, *minus, last], lines)


RECIPE_BASES = {"damex_best": "the recipe", "dense": "the same without experts"}
PARTS = {
    "by_token": "every token chooses for itself, in training and evaluation",
    "forced_without_vote": "training by dataset, evaluation by token",
    "vote_without_forcing": "training by token, evaluation by the image's vote",
    "decoder_only": "experts only in the decoder",
    "encoder_only": "experts only in the encoder",
    "last_of_encoder": "experts only in the last encoder layer",
    "whole_ffns": "a full FFN per dataset, none shared",
    "whole_ffns_upcycled": "the same, dense for the first quarter",
    "whole_ffns_near_their_mean": "the same, pulled to their mean",
    "shared_private": "three quarters of the FFN shared, a quarter private",
    "two_per_dataset": "two experts per dataset, hierarchical router",
    "rank_16": "adapters of rank 16 instead of 4",
    "label_prior": "class prior from the routers",
    "averaged": "averaged weights (EMA)",
    "dense_label_prior": "dense, class prior by its own head",
    "dense_averaged": "dense, averaged weights (EMA)",
    "dense_lr2": "at twice the learning rate",
}


def worlds_parts() -> str:
    """Ablations of the recipe on eight worlds with conflicting names."""
    whole = worlds_of("eight")
    arms = {**worlds_of("parts"), **{name: whole[name] for name in RECIPE_BASES}}
    lines = [
        [
            f"`{name}`",
            change,
            str(len(arms[name]["mean_ap"])),
            mean(arms[name]),
            *(gain(arms, name, base) for base in RECIPE_BASES),
        ]
        for name, change in (RECIPE_BASES | PARTS).items()
        if name in arms
    ]
    minus = [f"minus `{base}` [95%]" for base in RECIPE_BASES]
    return markdown(["arm", "change", "seeds", "mean AP", *minus], lines)


def worlds_parts_tested() -> str:
    """The arms that seed 1 selected, on five later seeds, with Holm's correction."""
    arms = {
        name: {**arm, "mean_ap": arm["mean_ap"][-FEWEST_SEEDS:]}
        for name, arm in worlds_of("parts").items()
        if name == "damex_best" or len(arm["mean_ap"]) > FEWEST_SEEDS
    }
    places = verdicts(arms, "damex_best")
    lines = [
        [f"`{name}`", mean(arm), gain(arms, name, "damex_best"), places.get(name, "-")]
        for name, arm in arms.items()
    ]
    return markdown(["arm", "mean AP", "minus `damex_best` [95%]", "place"], lines)


def worlds_padding() -> str:
    """Eight worlds, padded to a square in all pipelines or by batch in training."""
    batch, square = worlds_of("batch"), worlds_of("eight")
    lines = []
    for name in batch:
        both = {"batch": batch[name], "square": square[name]}
        scores = [mean(both["batch"]), mean(both["square"])]
        lines.append([f"`{name}`", *scores, gain(both, "square", "batch")])
    return markdown(["", "batch", "letterbox", "difference [95%]"], lines)


GROWING = {
    "three": "three datasets",
    "new_parts": "wind turbines added, `train_only=[wind_turbines]`",
    "all_weights": "wind turbines added, all weights trained",
    "together": "all four from the start",
    "alone": "wind turbines alone, no experts",
    "dense_three": "three datasets, no experts",
    "dense_new_parts": "wind turbines added, `train_only`, no experts",
    "dense_all_weights": "wind turbines added, all weights, no experts",
}


def growing() -> str:
    """A dataset added to a trained detector: AP of the old ones and of the new one."""
    arms, new = arms_of("growing"), "wind_turbines"
    old = [name for name in arms["together"]["datasets"] if name != new]

    def over(names: Sequence[str]) -> Arms:
        """The arms that saw all of some datasets, with the mean AP of these."""
        rows = {
            arm: [found["datasets"][name] for name in names]
            for arm, found in arms.items()
            if {*names} <= {*found["datasets"]}
        }
        return {
            arm: {"mean_ap": [statistics.fmean(aps) for aps in zip(*row, strict=True)]}
            for arm, row in rows.items()
        }

    each = [over([name]) for name in (*old, new)]
    before, added, lines = over(old), each[-1], []
    for name in filter(arms.__contains__, GROWING):
        three = "dense_three" if name.startswith("dense_") else "three"
        lines.append(
            [
                GROWING[name],
                str(len(arms[name]["mean_ap"])),
                *(mean(scores.get(name, {})) for scores in each),
                gain(before, name, three),
                gain(added, name, "together"),
            ]
        )
    header = ["AP", "seeds", *(name.replace("_", " ") for name in (*old, new))]
    minus = ["mean of the old, minus before [95%]", "turbines, minus together [95%]"]
    return markdown([*header, *minus], lines)


def answer(arms: Arms, name: str, base: str) -> list[str]:
    """The cells of a question: scores, difference with interval, seeds."""
    counts = [str(len(arms[one]["mean_ap"])) for one in (base, name)]
    scores = (mean(arms[one]) for one in (base, name))
    return [*scores, gain(arms, name, base), ", ".join(dict.fromkeys(counts))]


def questions() -> str:
    """The questions that users ask, each with a number, for the page of results."""
    real, worlds = "../results/seven-datasets.md", "../results/worlds.md"
    why, halves = f"{worlds}#what-changes-the-gain", "../results/completing.md"
    grown, added = arms_of("growing"), "../results/growing.md"
    windows, full = f"{real}#windows-for-small-objects", f"{real}#template-with-windows"
    alike, muons = f"{real}#images-that-weigh-alike", f"{real}#muon"
    small = "../guides/transformers.md#a-small-detector-for-cpus"
    own = {**arms_of("one_or_seven"), "rt_detr_v2": arms_of("rt_detr_v2")["dense"]}
    tiles, missing = arms_of("tiles"), arms_of("completing")
    conflict, long, two, agree = map(worlds_of, ("eight", "long", "two", "agreeing"))
    seven, eight = "seven real datasets", "eight synthetic datasets"
    best, found = "damex_best", "ignored_if_found"
    written, twice = f"longer_completed_and_{found}", f"{halves}#twice-as-long"
    sketches = "halves of diagrams"
    both = "Windows, `image_balance=0.5` and experts"
    plain = "both without `image_balance` and Muon"
    again = "The same, 1,200 iterations,"
    rows = [
        ("One detector or seven, equal compute?", seven, own, "single", real),
        ("The same, 1,200 iterations?", seven, own, "longer_single", real),
        ("The same, 4,200 iterations?", seven, own, "single_full", real),
        ("Experts on datasets that look nothing alike?", seven, own, best, real),
        ("The same, 1,200 iterations?", seven, own, "longer_damex_best", real),
        ("The paper's `damex`?", seven, own, "damex", real),
        ("Windows for three datasets of small objects?", seven, tiles, "tile", windows),
        ("`image_balance=0.5`?", seven, balanced(*WHOLE), "root", alike),
        ("Muon for attention and FFNs?", seven, with_muon(), "root_muon", muons),
        (f"{again} with experts?", seven, with_muon(), "longer_best_muon", muons),
        (f"{both}, 4,200 iterations?", seven, own, "template_full", full),
        ("That, or a detector per dataset?", seven, own, "template_single_full", full),
        ("That, or without experts?", seven, own, "template_dense_full", full),
        ("Add a fourth dataset?", "four real datasets", grown, "all_weights", added),
        ("The same, `train_only`?", "four real datasets", grown, "new_parts", added),
        (f"RT-DETRv2, {plain}?", seven, own, "rt_detr_v2", small),
        ("Ignore what is not labeled?", sketches, missing, found, halves),
        ("Also write it, 1,200 iterations?", sketches, missing, written, twice),
        ("One name for different objects?", eight, conflict, best, worlds),
        ("The same, a head per dataset?", eight, conflict, "partitioned", worlds),
        ("The same, 2,400 iterations?", eight, long, best, why),
        ("Only two datasets?", "two of the eight", two, best, why),
        ("Names that agree?", eight, agree, best, why),
    ]
    bases = {found: "negatives", written: "longer_negatives", "root_muon": "root"}
    bases["longer_best_muon"] = "longer_best"
    bases |= dict.fromkeys(("all_weights", "new_parts"), "together")
    longest = ("template_single_full", "template_dense_full")
    bases |= dict.fromkeys(longest, "template_full")
    lines = []
    for question, data, arms, arm, page in rows:
        cells = answer(arms, arm, bases.get(arm, equal(arm)))
        lines.append([f"[{question}]({page})", data, f"`{arm}`", *cells])
    header = ["question", "data", "arm", "mean AP, baseline", "the arm"]
    return markdown([*header, "difference [95%]", "seeds"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "one-or-seven": one_or_seven,
    "experts": experts_in_short,
    "questions": questions,
    "seven-datasets": real,
    "seven-datasets-by-dataset": lambda: by_dataset(arms_of("one_or_seven"), ARMS),
    "detectors": detectors,
    "detectors-by-dataset": detectors_by_dataset,
    "full-price": full_price,
    "completing": completing,
    "completing-longer": partial(completing, texts=LONGER),
    "completing-on-a-gpu": partial(completing, "completing_gpu"),
    "completing-aquarium": partial(completing, "completing_aquarium"),
    "split-labels": split_labels,
    "tiles": lambda: variants(arms_of("tiles"), TILES, "whole images"),
    "balanced": lambda: variants(balanced(*WHOLE), BALANCED, "`image_balance=0`"),
    "balanced-windows": lambda: variants(balanced(*TILED), BOTH, "windows alone"),
    "balanced-windows-by-dataset": lambda: by_dataset(balanced(*TILED), BOTH),
    "balanced-experts": lambda: variants(
        balanced(*EXPERTS), WITH_EXPERTS, "`damex_best` alone"
    ),
    "balanced-experts-by-dataset": lambda: by_dataset(balanced(*EXPERTS), WITH_EXPERTS),
    "balanced-by-dataset": lambda: by_dataset(balanced(*WHOLE), BALANCED),
    "muon": lambda: muon(MUON),
    "muon-tuned": tuned,
    "muon-longer": lambda: muon(LONGER_MUON),
    "muon-longer-by-dataset": lambda: by_dataset(with_muon(), LONGER_MUON),
    "muon-longer-ap50": lambda: by_dataset(
        with_muon(), LONGER_MUON, score="datasets_ap50"
    ),
    "muon-by-dataset": lambda: by_dataset(with_muon(), MUON),
    "tiles-by-dataset": lambda: by_dataset(arms_of("tiles"), TILES),
    "tiles-by-size": tiles_by_size,
    "worlds": worlds,
    "worlds-conditions": worlds_conditions,
    "worlds-parts": worlds_parts,
    "worlds-parts-tested": worlds_parts_tested,
    "worlds-padding": worlds_padding,
    "growing": growing,
}


def with_tables(text: str) -> str:
    """A page with the tables that it marks."""
    return TABLE.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]().strip()}\n\n{m[3]}", text)


# ---- figures ----


def dot_plot(rows: Mapping[str, Scores]) -> Figure:
    """Mean AP: a dot per seed, a bar at the mean, a line at the first row's mean."""
    figure = Figure(figsize=(7.5, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, values in enumerate(rows.values()):
        center = statistics.fmean(values)
        axes.plot(values, [place] * len(values), "o", color="#2a6f97", alpha=0.6)
        axes.plot(center, place, "|", color="black", markersize=14)
        if place == 0:
            axes.axvline(center, color="#b2603a", linewidth=1)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row at the top
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("mean AP")
    note = "dots: seeds; bars: mean; red: the first row"
    figure.supxlabel(note, fontsize="small")
    return figure


def length_plot() -> Figure:
    """Mean AP on eight worlds by the length of training, a dot per seed."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    lengths = {600: "eight", 1200: "twice", 2400: "long"}
    colors = {"dense": "#b2603a", "damex_best": "#2a6f97", "partitioned": "#4f7942"}
    for name, color in colors.items():
        scores = {n: worlds_of(kind)[name]["mean_ap"] for n, kind in lengths.items()}
        for length, values in scores.items():
            axes.plot([length] * len(values), values, "o", color=color, alpha=0.6)
        means = list(map(statistics.fmean, scores.values()))
        axes.plot(list(scores), means, "-", color=color, label=name)
    axes.set_xticks(list(lengths))
    axes.set_xlabel("iterations of batch 8")
    axes.set_ylabel("mean AP")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def draw() -> None:
    """Write the figures of the pages."""
    images = ROOT / "docs/images"
    seven, conflicting = arms_of("one_or_seven"), worlds_of("eight")
    names = {name: ARMS[name].replace("`", "") for name in ARMS if name in seven}
    rows = {text: seven[name]["mean_ap"] for name, text in names.items()}
    dot_plot(rows).savefig(images / "seven-datasets.png", dpi=120)
    rows = {name: conflicting[name]["mean_ap"] for name in WORLD_ARMS}
    dot_plot(rows).savefig(images / "headroom-worlds.png", dpi=120)
    length_plot().savefig(images / "length-worlds.png", dpi=120)


def main() -> None:
    """Write pages and figures."""
    for page in PAGES:
        text = page.read_text("utf-8")
        if (new := with_tables(text)) != text:
            page.write_text(new, encoding="utf-8")
    draw()


if __name__ == "__main__":
    main()
