"""The numbers of a headroom ladder: its rows and their tables.

A row holds one score per seed, in the order of the seeds, None where a run is missing.
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
    """The scores of one rung.

    Args:
        summaries: ``summary.json`` of each seed; None where it has not finished.

    Returns:
        ``mean_ap50``, ``mean_ap`` and ``pooled_ap``, each a list with one number per
        seed, and ``datasets`` with the lists ``ap50`` and ``ap`` of each.
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
    """One row of what the detectors of single datasets score, each on its own.

    Args:
        rows: By dataset, as :func:`rung_row` makes them.

    Returns:
        A row whose means are over datasets, of seeds in which all of them finished.
        Nothing is pooled: no detector knows all classes.
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
    """Scores by what was zeroed.

    Args:
        summaries: What ``zero_ffns`` wrote for each seed; None where it has not.

    Returns:
        Rows of :data:`SCORES`, ``none`` for the detector as it is.
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
    """Add to each row what its mean AP has over that of one of them, seed by seed.

    Args:
        rows: With ``mean_ap``.
        base: Name of the row that they are compared with.

    Returns:
        Rows with ``minus_<base>``: ``mean`` and ``ci95``, the ends of the 95 %
        interval, None for one seed; None for the row itself, or without a common seed.
    """
    compared = {}
    for name, row in rows.items():
        found = None
        if name != base and base in rows:
            found = paired_difference(row["mean_ap"], rows[base]["mean_ap"])
        compared[name] = {**row, f"minus_{base}": found and found._asdict()}
    return compared


def ladder_table(rows: Mapping[str, Mapping[str, Any]], *, kind: str) -> str:
    """The rows as Markdown: mean and sample deviation over seeds.

    Args:
        rows: As :func:`with_differences` makes them, compared with the first.
        kind: What a row is.
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
