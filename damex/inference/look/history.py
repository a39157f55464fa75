"""Training history next to a checkpoint: scores and curves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from damex.engine.schedule import length_key

Curve = list[tuple[float, float]]
# Chart title -> pattern of its scalars; the group is the name of the curve.
CHARTS = {
    "AP of each dataset": r"mixture/(?!mean/|pooled/)(.+)/AP",
    "Losses of the routers": r"(loss_moe_.+)",
    "Routing accuracy in training": r"(moe_routing_accuracy)",
    "Evenness of each layer": r"routing/(.+)/evenness",
}
LOADS = r"routing/(.+)/(expert_\d+)"
SPLIT = re.compile(r"_(\d{8}_\d{6})$")


@dataclass(frozen=True)
class History:
    """Logged scores and curves of a run.

    Attributes:
        scores: Metrics of the evaluation of this checkpoint; empty if missing.
        charts: Curves over epochs or iterations by title and name.
        note: Missing parts, as a sentence; empty if complete.
    """

    scores: Mapping[str, float]
    charts: Mapping[str, Mapping[str, Curve]]
    note: str = ""


def read_history(
    checkpoint: Path, meta: Mapping[str, Any], train_cfg: Mapping[str, Any]
) -> History:
    """Read ``vis_data/scalars.json`` of the run that wrote a checkpoint.

    Args:
        checkpoint: The .pth file.
        meta: Its metadata: ``experiment_name``, which ends in the name of the log
            folder next to it, ``epoch`` and ``iter``.
        train_cfg: Tells whether the training loop counts epochs or iterations.
    """
    found = SPLIT.search(str(meta.get("experiment_name", "")))
    folder = checkpoint.parent / (found.group(1) if found else "")
    path = folder / "vis_data" / "scalars.json"
    if not path.is_file():
        scores = _scores_of_summary(checkpoint)
        missing = "No curves" if scores else "No curves and no AP"
        return History(scores, {}, f"{missing}: {path} of the training is not there.")
    lines = _lines(path)
    scores = _scores_at(lines, meta.get(length_key(train_cfg)[4:-1]))
    charts = {title: curves(lines, name) for title, name in CHARTS.items()}
    charts |= _loads(lines)
    charts = {title: found for title, found in charts.items() if found}
    note = "" if scores else f"No AP: {path} has no evaluation of this checkpoint."
    return History(scores, charts, note)


def curves(lines: Iterable[Mapping[str, Any]], name: str) -> dict[str, Curve]:
    """Points of all scalars whose full name matches, keyed by the first regex group."""
    pattern, found = re.compile(name), dict[str, Curve]()
    for line in lines:
        for key, value in line.items():
            match = pattern.fullmatch(key)
            if match and isinstance(value, (int, float)) and math.isfinite(value):
                points = found.setdefault(match.group(1), [])
                points.append((float(line.get("step", len(points))), float(value)))
    return found


def _loads(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Per layer, a chart of the load of its experts."""
    names = {key: re.fullmatch(LOADS, key) for line in lines for key in line}
    layers = dict.fromkeys(match.group(1) for match in names.values() if match)
    return {
        f"Load of {layer}": curves(lines, rf"routing/{re.escape(layer)}/(expert_\d+)")
        for layer in layers
    }


def _scores_at(lines: Iterable[Mapping[str, Any]], step: Any) -> dict[str, float]:
    """Metrics of the last evaluation at a step; empty if the step is unknown."""
    found: dict[str, float] = {}
    for line in lines:
        own = {k: v for k, v in line.items() if k.startswith("mixture/")}
        if own and step is not None and line.get("step") == step:
            found = own
    return found


def _scores_of_summary(checkpoint: Path) -> dict[str, float]:
    """Metrics in ``summary.json`` if of this checkpoint, the last of its run."""
    folder = checkpoint.parent
    try:
        last = (folder / "last_checkpoint").read_text(encoding="utf-8").strip()
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rows = {name: dict(row) for name, row in summary["datasets"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    if Path(last).name != checkpoint.name:
        return {}
    for name, accuracy in summary.get("routing_accuracy", {}).items():
        rows.setdefault(name, {})["routing_accuracy"] = accuracy
    return {
        f"mixture/{name}/{key.upper() if key.startswith('ap') else key}": value
        for name, row in rows.items()
        for key, value in row.items()
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    """All readable lines; a killed run leaves a partial one."""
    found = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found
