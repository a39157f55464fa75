"""Gather the ladders of several mixtures: ``experts.json`` next to this file.

    python docs/results/collect.py NAME=WORK_DIR/headroom.json ...

A mixture that is not named keeps its entry in the file, and so does a rung of a
ladder that the new run left out.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_name("experts.json")
ARMS = {"dense": "dense", "dense_lr2": "dense_lr2", "damex_best": "recipe"}
SCORES = ("mean_ap50", "mean_ap", "pooled_ap")
WORDS = {"yes": "help", "no": "no help", "undecided": "undecided"}


def collect(arguments: Sequence[str]) -> None:
    """Read what ``damex headroom --experts damex_best`` wrote, and join it."""
    known = json.loads(OUT.read_text("utf-8")) if OUT.is_file() else {"mixtures": {}}
    for argument in arguments:
        name, _, path = argument.partition("=")
        found = mixture(json.loads(Path(path).read_text("utf-8")))
        old = known["mixtures"].get(name, {"ladder": {}})
        found["ladder"] = old["ladder"] | found["ladder"]
        known["mixtures"][name] = found
    OUT.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def mixture(found: Mapping[str, Any]) -> dict[str, Any]:
    """One mixture: its arms, its ladder, the prediction and what came out."""
    rungs, verdict = found["rungs"], found["verdict"]
    recipe = found["experts"].get("damex_best")
    return dict(
        seeds=len(found["seeds"]),
        arms={arm: means(rungs[rung]) for rung, arm in ARMS.items() if rung in rungs},
        recipe_minus_best_dense=recipe and recipe["minus_best_dense"],
        best_dense=verdict["reference"],
        ladder={
            rung: means(rungs[rung]) | {"minus_best_dense": difference}
            for rung, difference in verdict["differences"].items()
        },
        predicted=WORDS[verdict["answer"]],
        found=recipe and ("help" if recipe["helps"] else "no help"),
    )


def means(row: Mapping[str, Any]) -> dict[str, Any]:
    """Means over seeds, and the scores of each."""
    known = {key: [v for v in row[key] if v is not None] for key in SCORES}
    found: dict[str, Any] = {
        key: round(statistics.fmean(values), 4) if values else None
        for key, values in known.items()
    }
    return found | {"mean_ap_of_seeds": row["mean_ap"]}


if __name__ == "__main__":
    collect(sys.argv[1:])
