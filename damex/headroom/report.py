"""Rows, table and plot of a headroom ladder.

A row holds one score per seed, in the order of the seeds, None if a run is missing.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from damex.engine.summary import markdown
from damex.headroom.baselines import RECIPE, single_name
from damex.headroom.verdict import (
    NO_VERDICT,
    Difference,
    Scores,
    best_dense,
    is_above,
    judge,
    paired_difference,
    spread,
)

Summaries = Mapping[str, Sequence[Mapping[str, Any] | None]]
SCORES = ("mean_ap50", "mean_ap", "pooled_ap")


def report(
    summaries: Summaries,
    *,
    datasets: Sequence[str],
    seeds: Sequence[int],
    experts: Sequence[str] = (),
) -> dict[str, Any]:
    """Collect all results as plain values.

    Args:
        summaries: Of each rung, one per seed; None if missing. The rung ``zeroed``
            holds the output of ``ablate_ffns``.
        datasets: Names in the mixture.
        seeds: Their numbers.
        experts: Rungs that are mixtures of experts.

    Returns:
        ``seeds``; ``missing``, pairs of a rung and a seed; ``rungs`` and
        ``zeroed``, rows of scores with one number per seed and their differences to the
        first row; ``verdict``, its ``answer`` None if there is none; ``experts``, the
        gain of each, and of their rival ``partitioned``, over the better dense rung.
    """
    trained = {n: found for n, found in summaries.items() if n != "zeroed"}
    if RECIPE not in experts:  # trained for the oracle
        trained.pop(RECIPE, None)
    rows = {name: rung_row(found) for name, found in trained.items()}
    singles = {n: rows.pop(single_name(n)) for n in datasets if single_name(n) in rows}
    if singles:
        rows["single"] = single_row(singles)
    rows |= {name: rows.pop(name) for name in experts}  # below the ladder
    mean_ap = {name: row["mean_ap"] for name, row in rows.items()}
    verdict, (reference, _) = judge(mean_ap), best_dense(mean_ap)
    judged: dict[str, Any] = dict(answer=None, text=NO_VERDICT)
    if verdict is not None:
        judged = {**dataclasses.asdict(verdict), "text": str(verdict)}
        judged["differences"] = {
            name: one._asdict() for name, one in verdict.differences.items()
        }
    rivals = [name for name in ("partitioned",) if name in rows]
    runs = {n: zip(seeds, found, strict=True) for n, found in summaries.items()}
    return dict(
        seeds=list(seeds),
        missing=[(n, seed) for n, pairs in runs.items() for seed, x in pairs if not x],
        rungs=with_differences(rows, base="dense"),
        zeroed=with_differences(zeroed_rows(summaries.get("zeroed", ())), base="none"),
        verdict=judged,
        experts={
            name: outcome
            for name in [*rivals, *experts]
            if (outcome := _outcome(rows, name, reference))
        },
    )


def _outcome(
    rows: Mapping[str, Mapping[str, Any]], name: str, reference: str
) -> dict[str, Any] | None:
    """Gain of a rung over the reference; None without a common seed."""
    gain = paired_difference(rows[name]["mean_ap"], rows[reference]["mean_ap"])
    if gain is None:
        return None
    helps = is_above(gain)
    words = "helps" if helps else "is not shown to help"
    text = f"{name} {words}: {gain} over {reference} in mean AP."
    return dict(minus_best_dense=gain._asdict(), helps=helps, text=text)


def rung_row(summaries: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Scores of one rung, from ``summary.json`` of each seed.

    Returns:
        ``mean_ap50``, ``mean_ap`` and ``pooled_ap``, and ``datasets`` with ``ap50`` and
        ``ap`` of each; all are lists over seeds.
    """
    found = [summary for summary in summaries if summary is not None]
    row: dict[str, Any] = {
        key: [run and run[key] for run in summaries] for key in SCORES
    }
    row["datasets"] = {
        name: {
            key: [run and run["datasets"][name][key] for run in summaries]
            for key in ("ap50", "ap")
        }
        for name in (found[0]["datasets"] if found else ())
    }
    return row


def single_row(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the rows of single-dataset detectors into one.

    Means are over datasets, for seeds in which all finished. Nothing is pooled: no
    detector knows all classes.
    """
    row: dict[str, Any] = {}
    for key in ("mean_ap50", "mean_ap"):
        seeds = zip(*(one[key] for one in rows.values()), strict=True)
        row[key] = [
            None if None in found else statistics.fmean(found) for found in seeds
        ]
    row["pooled_ap"] = [None] * len(row["mean_ap"])
    row["datasets"] = {
        name: own for one in rows.values() for name, own in one["datasets"].items()
    }
    return row


def zeroed_rows(
    summaries: Sequence[Mapping[str, Any] | None],
) -> dict[str, dict[str, Any]]:
    """Scores by zeroed site, from the output of ``ablate_ffns`` for each seed.

    The row ``none`` is the unchanged detector.
    """
    found = [run and {"none": run, **run["zeroed"]} for run in summaries]
    sites = next((list(run) for run in found if run), [])
    return {
        site: {key: [run and run[site][key] for run in found] for key in SCORES}
        for site in sites
    }


def with_differences(
    rows: Mapping[str, Mapping[str, Any]], *, base: str
) -> dict[str, dict[str, Any]]:
    """Add ``minus_<base>`` to rows: mean and ``ci95`` of the paired AP difference.

    ``ci95`` is None for one seed; the entry is None for `base` itself, or without a
    common seed.
    """
    against, compared = rows.get(base, {}).get("mean_ap"), {}
    for name, row in rows.items():
        found = None if name == base else paired_difference(row["mean_ap"], against)
        compared[name] = {**row, f"minus_{base}": found and found._asdict()}
    return compared


def ladder_table(rows: Mapping[str, Mapping[str, Any]], *, kind: str) -> str:
    """Format the rows of :func:`with_differences` as Markdown: mean and deviation.

    `kind` is the header of the first column; `rows` are compared with the first.
    """
    base = next(iter(rows), "")
    names = dict.fromkeys(n for row in rows.values() for n in row.get("datasets", ()))
    header = [kind, "mean AP50", "mean AP", f"minus {base} [95%]", "pooled AP"]
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


def cell(value: Any) -> str:
    """Format a table cell; ``-`` for None."""
    return "-" if value is None else str(value)


def dot_plot(rows: Mapping[str, Scores], *, score: str) -> Figure:
    """Plot a dot per seed and a bar at the mean of each row, against the first row.

    A band marks mean and sample deviation of the first row. `rows` hold one `score` per
    seed, None if unfinished; rows without any are omitted.
    """
    known = {
        name: [v for v in values if v is not None] for name, values in rows.items()
    }
    shown = {name: values for name, values in known.items() if values}
    figure = Figure(figsize=(7.5, 1.2 + 0.3 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for place, values in enumerate(shown.values()):
        axes.plot(values, [place] * len(values), "o", color="#2a6f97", alpha=0.6)
        axes.plot(statistics.fmean(values), place, "|", color="black", markersize=14)
    first = spread(next(iter(shown.values()), ()))
    if first is not None:
        reach = first.deviation or 0.0
        axes.axvline(first.mean, color="#b2603a", linewidth=1)
        axes.axvspan(
            first.mean - reach, first.mean + reach, color="#b2603a", alpha=0.15
        )
    axes.set_yticks(range(len(shown)), list(shown))
    axes.set_ylim(max(len(shown), 1) - 0.5, -0.5)  # the first row at the top
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(score)
    figure.supxlabel(
        "dots: seeds; bars: their mean; band: mean and deviation of the first row",
        fontsize="small",
    )
    return figure
