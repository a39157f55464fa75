"""Rows of a comparison over seeds, their table and their plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from damex.analysis.intervals import Spread, paired_difference, spread

HEADER = (
    "mixture of experts",
    "mean AP50",
    "minus the first row's [95 %]",
    "mean AP",
    "pooled AP",
    "routing accuracy",
    "max load",
    "s / iteration",
    "times the first row's",
    "peak memory",
)


def comparison_row(
    name: str,
    scored: Sequence[Mapping[str, Any] | None],
    timed: Sequence[Mapping[str, Any] | None] = (),
) -> dict[str, Any]:
    """Mean and spread over seeds, and medians over timed rounds.

    Args:
        name: Name of the row.
        scored: ``summary.json`` of one run per seed; None if unfinished.
        timed: ``summary.json`` of the short runs that measure time and memory.

    Returns:
        Pairs of mean and sample deviation (None if a run lacks the number; no deviation
        for a single run) as ``ap50``, ``ap``, ``pooled_ap``, ``routing_accuracy``,
        ``max_load`` and, by dataset, ``datasets`` (AP50); ``ap50_seeds`` with the AP50
        of every seed; ``seeds``, the number of finished ones; ``seconds_per_iteration``
        and ``peak_memory_mib``.
    """
    runs = [run for run in scored if run is not None]
    rounds = [run for run in timed if run is not None and _trained(run)]
    shares = [(run.get("routing_accuracy") or {}).get("mean") for run in runs]
    names = runs[0]["datasets"] if runs else ()
    return dict(
        name=name,
        seeds=len(runs),
        ap50=_spread([run["mean_ap50"] for run in runs]),
        ap50_seeds=[None if run is None else run["mean_ap50"] for run in scored],
        ap=_spread([run["mean_ap"] for run in runs]),
        pooled_ap=_spread([run.get("pooled_ap") for run in runs]),
        routing_accuracy=_spread(shares),
        max_load=_spread([run.get("max_load") for run in runs]),
        datasets={
            dataset: _spread([run["datasets"][dataset]["ap50"] for run in runs])
            for dataset in names
        },
        seconds_per_iteration=_median(
            [run["train_seconds"] / _trained(run) for run in rounds]
        ),
        peak_memory_mib=_median([run["peak_memory_mib"] for run in rounds]),
    )


def with_differences(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add ``ap50_minus_first`` to rows of the same seeds: mean and 95 % interval.

    It is None for the first row, and without a seed finished in both.
    """
    return [
        dict(
            row,
            ap50_minus_first=paired_difference(row["ap50_seeds"], rows[0]["ap50_seeds"])
            if place
            else None,
        )
        for place, row in enumerate(rows)
    ]


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows of :func:`with_differences` as Markdown."""
    base = rows[0]["seconds_per_iteration"] if rows else None
    return markdown(HEADER, [_cells(row, base) for row in rows])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _cells(row: Mapping[str, Any], base: float | None) -> tuple[str, ...]:
    seconds, memory = row["seconds_per_iteration"], row["peak_memory_mib"]
    return (
        row["name"],
        cell(row["ap50"]),
        cell(row["ap50_minus_first"]),
        cell(row["ap"]),
        cell(row["pooled_ap"]),
        _percent(row["routing_accuracy"]),
        _percent(row["max_load"]),
        "-" if seconds is None else f"{seconds:.3f}",
        "-" if seconds is None or not base else f"{seconds / base:.2f}",
        "-" if memory is None else f"{memory:.0f} MiB",
    )


def _trained(run: Mapping[str, Any]) -> int:
    """Iterations covered by ``train_seconds``; all of them in older summaries."""
    return run.get("trained_iterations", run["iterations"])


def _spread(values: Sequence[float | None]) -> Spread | None:
    """Spread, or None if a run lacks the number."""
    return None if None in values else spread(values)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def cell(value: Any) -> str:
    """Format a table cell; ``-`` for None."""
    return "-" if value is None else str(value)


def _percent(spread: tuple[float, float | None] | None) -> str:
    return "-" if spread is None else f"{spread[0]:.1%}"


def dot_plot(rows: Mapping[str, Sequence[float | None]], *, score: str) -> Figure:
    """Plot a dot per seed and a bar at the mean of each row, against the first row.

    A band marks mean and sample deviation of the first row. `rows` hold one `score` per
    seed, None if unfinished; rows without any are omitted.
    """
    known = {
        name: [value for value in values if value is not None]
        for name, values in rows.items()
    }
    shown = {name: values for name, values in known.items() if values}
    figure = Figure(figsize=(7.5, 1.2 + 0.3 * len(shown)), layout="constrained")
    axes = figure.subplots()
    spreads = [spread(values) for values in shown.values()]
    for place, (values, row) in enumerate(zip(shown.values(), spreads, strict=True)):
        axes.plot(values, [place] * len(values), "o", color="#2a6f97", alpha=0.6)
        if row is not None:
            axes.plot(row.mean, place, "|", color="black", markersize=14)
    first = spreads[0] if spreads else None
    if first is not None:
        axes.axvline(first.mean, color="#b2603a", linewidth=1)
        if first.deviation is not None:
            reach = (first.mean - first.deviation, first.mean + first.deviation)
            axes.axvspan(*reach, color="#b2603a", alpha=0.15)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(
        f"{score} (dots: seeds, bars: their mean, band: first row, mean and deviation)"
    )
    return figure
