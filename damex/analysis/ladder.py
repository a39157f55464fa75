"""Rows and tables of a headroom ladder.

A row holds one score per seed, in the order of the seeds, None if a run is missing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from damex.analysis.comparison import cell, markdown
from damex.analysis.intervals import Difference, paired_difference, spread

Scores = Sequence[float | None]
SCORES = ("mean_ap50", "mean_ap", "pooled_ap")


def rung_row(summaries: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Scores of one rung, from ``summary.json`` of each seed.

    Returns:
        ``mean_ap50``, ``mean_ap`` and ``pooled_ap``, and ``datasets`` with ``ap50`` and
        ``ap`` of each; all are lists over seeds.
    """
    found = [summary for summary in summaries if summary is not None]
    names = found[0]["datasets"] if found else ()
    row: dict[str, Any] = {
        key: [run and run[key] for run in summaries] for key in SCORES
    }
    row["datasets"] = {
        name: {
            key: [run and run["datasets"][name][key] for run in summaries]
            for key in ("ap50", "ap")
        }
        for name in names
    }
    return row


def single_row(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the rows of single-dataset detectors into one.

    Means are over datasets, for seeds in which all finished. Nothing is pooled: no
    detector knows all classes.
    """
    row: dict[str, Any] = {
        key: [
            _mean(values)
            for values in zip(*(r[key] for r in rows.values()), strict=True)
        ]
        for key in ("mean_ap50", "mean_ap")
    }
    row["pooled_ap"] = [None] * len(row["mean_ap"])
    row["datasets"] = {
        name: own for one in rows.values() for name, own in one["datasets"].items()
    }
    return row


def zeroed_rows(
    summaries: Sequence[Mapping[str, Any] | None],
) -> dict[str, dict[str, Any]]:
    """Scores by zeroed site, from the output of ``zero_ffns`` for each seed.

    The row ``none`` is the unchanged detector.
    """
    found = [run and {"none": run, **run["zeroed"]} for run in summaries]
    sites = next((list(run) for run in found if run), [])
    return {
        site: {key: [run and run[site][key] for run in found] for key in SCORES}
        for site in sites
    }


def _mean(values: Scores) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def with_differences(
    rows: Mapping[str, Mapping[str, Any]], *, base: str
) -> dict[str, dict[str, Any]]:
    """Add ``minus_<base>`` to rows: mean and ``ci95`` of the paired AP difference.

    ``ci95`` is None for one seed; the entry is None for `base` itself, or without a
    common seed.
    """
    compared = {}
    for name, row in rows.items():
        found = None
        if name != base and base in rows:
            found = paired_difference(row["mean_ap"], rows[base]["mean_ap"])
        compared[name] = {**row, f"minus_{base}": found and found._asdict()}
    return compared


def ladder_table(rows: Mapping[str, Mapping[str, Any]], *, kind: str) -> str:
    """Format the rows of :func:`with_differences` as Markdown: mean and deviation.

    `kind` is the header of the first column; `rows` are compared with the first.
    """
    base = next(iter(rows), "")
    names = dict.fromkeys(n for row in rows.values() for n in row.get("datasets", ()))
    header = [kind, "mean AP50", "mean AP", f"minus {base} [95 %]", "pooled AP"]
    lines = []
    for name, row in rows.items():
        difference = row[f"minus_{base}"]
        own = [row["datasets"].get(n, {}).get("ap", ()) for n in names]
        cells = [
            spread(row["mean_ap50"]),
            spread(row["mean_ap"]),
            None if difference is None else Difference(**difference),
            spread(row["pooled_ap"]),
            *map(spread, own),
        ]
        lines.append([name, *map(cell, cells)])
    return markdown([*header, *(f"{name} AP" for name in names)], lines)
