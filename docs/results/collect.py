"""Add the runs of ``damex headroom`` to a JSON file of scores.

    python docs/results/collect.py WORK_DIR OUT.json [PREFIX]

A record per arm and seed, with the machine, the versions and the commit, so that a
measurement can be continued on another day. Earlier records are kept. The names of
arms in the file begin with PREFIX.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from damex.engine.summary import versions
from damex.workbench.headroom.baselines import SINGLES


def machine() -> str:
    """The GPU or the kind of CPU, its vectors, the commit and the versions, in a line.

    A machine with a GPU is taken to have trained on it.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.is_file() else []
    models = {line.partition(": ")[2] for line in lines if line.startswith("model na")}
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    vectors = torch.backends.cpu.get_cpu_capability()
    installed = [f"{name} {number}" for name, number in versions().items()]
    gpus = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join(
        [*gpus, *(sorted(models) or [platform.machine()]), vectors, commit, *installed]
    )


def summary(folder: Path, prefix: str = "") -> dict[str, Any] | None:
    """The summary of a run, None if it has not finished."""
    path = folder / f"{prefix}summary.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found if found["datasets"] else None


def runs_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Finished runs; the detectors of ``single`` and ``single_full`` as one."""
    datasets: list[str] = []
    for path in sorted(folder.glob("*/seed*")):
        arm, seed = path.parent.name, int(path.name.removeprefix("seed"))
        found = summary(path) or summary(path, "test_")  # oracle is a test
        if found is None or arm.startswith(SINGLES) or arm.endswith("-not_told"):
            continue
        datasets = list(found["datasets"])
        record: dict[str, Any] = dict(arm=arm, seed=seed)
        record |= {key: found[key] for key in ("mean_ap", "mean_ap50", "pooled_ap")}
        if again := summary(folder / f"{arm}-not_told" / path.name, "test_"):
            record["not_told"] = again["mean_ap"]
            record["pooled_not_told"] = again["pooled_ap"]
        if shares := found.get("routing_accuracy"):
            record["routing"] = shares
        for key, score in {"datasets": "ap", "datasets_ap50": "ap50"}.items():
            record[key] = {name: one[score] for name, one in found["datasets"].items()}
        record["sizes"] = {
            name: [one.get(f"ap_{size}") for size in ("small", "medium", "large")]
            for name, one in found["datasets"].items()
        }
        yield record
    for arm in SINGLES:
        parts = [folder / f"{arm}_{name}" for name in datasets]
        for path in sorted(parts[0].glob("seed*")) if parts else ():
            found_all = [summary(part / path.name) for part in parts]
            alone = [one for one in found_all if one is not None]
            if len(alone) == len(parts):
                yield dict(
                    arm=arm,
                    seed=int(path.name.removeprefix("seed")),
                    **{
                        key: round(statistics.fmean(one[key] for one in alone), 6)
                        for key in ("mean_ap", "mean_ap50")
                    },
                    datasets={
                        name: one["mean_ap"]
                        for name, one in zip(datasets, alone, strict=True)
                    },
                )


def collect(folder: Path, out: Path, prefix: str = "") -> None:
    """Add the runs of a work directory to a file of runs."""
    content = json.loads(out.read_text("utf-8")) if out.is_file() else {"runs": []}
    runs = {(run["arm"], run["seed"]): run for run in content["runs"]}
    for run in runs_of(folder):
        run["arm"] = prefix + run["arm"]
        known = runs.get(key := (run["arm"], run["seed"]), {"machine": machine()})
        runs[key] = {**run, **known}
    lines = ",\n  ".join(json.dumps(runs[key]) for key in sorted(runs))
    out.write_text(f'{{\n "runs": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Collect the runs of ``arguments[0]`` in ``arguments[1]``."""
    folder, out, *prefix = arguments
    collect(Path(folder), Path(out), "".join(prefix))


if __name__ == "__main__":
    main(sys.argv[1:])
