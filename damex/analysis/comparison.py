"""The numbers of a comparison: rows over seeds, their table and their picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

HEADER = (
    "mixture of experts",
    "mean AP50",
    "mean AP",
    "routing accuracy",
    "max load",
    "s / iteration",
    "against the first row",
    "peak memory",
)


def comparison_row(
    name: str,
    scored: Sequence[Mapping[str, Any]],
    timed: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Mean and spread over seeds, and medians over timed rounds.

    Args:
        name: Name of the row.
        scored: ``summary.json`` of one run per seed.
        timed: ``summary.json`` of the short runs that measure time and memory.

    Returns:
        ``ap50``, ``ap``, ``routing_accuracy`` and ``max_load``, each a pair of mean and
        sample standard deviation (None where a run has no such number, the deviation
        None for one run), ``ap50_seeds`` with the AP50 of every run, ``datasets`` with
        the mean AP50 of each, ``seeds``, ``seconds_per_iteration`` and
        ``peak_memory_mib``.
    """
    shares = [(run.get("routing_accuracy") or {}).get("mean") for run in scored]
    names = scored[0]["datasets"] if scored else ()
    return dict(
        name=name,
        seeds=len(scored),
        ap50=_spread([run["mean_ap50"] for run in scored]),
        ap50_seeds=[run["mean_ap50"] for run in scored],
        ap=_spread([run["mean_ap"] for run in scored]),
        routing_accuracy=_spread(shares),
        max_load=_spread([run.get("max_load") for run in scored]),
        datasets={
            dataset: _spread([run["datasets"][dataset]["ap50"] for run in scored])
            for dataset in names
        },
        seconds_per_iteration=_median(
            [run["train_seconds"] / run["iterations"] for run in timed]
        ),
        peak_memory_mib=_median([run["peak_memory_mib"] for run in timed]),
    )


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown: quality with its spread, shares, time and memory.

    Args:
        rows: As :func:`comparison_row` makes them; times are compared with the first.
    """
    base = rows[0]["seconds_per_iteration"] if rows else None
    lines = [HEADER, ("---",) + ("---:",) * (len(HEADER) - 1)]
    lines += [_cells(row, base) for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _cells(row: Mapping[str, Any], base: float | None) -> tuple[str, ...]:
    seconds, memory = row["seconds_per_iteration"], row["peak_memory_mib"]
    return (
        row["name"],
        _plus_minus(row["ap50"]),
        _plus_minus(row["ap"]),
        _percent(row["routing_accuracy"]),
        _percent(row["max_load"]),
        "-" if seconds is None else f"{seconds:.3f}",
        "-" if seconds is None or base is None else f"{seconds / base:.2f}",
        "-" if memory is None else f"{memory:.0f} MiB",
    )


def _spread(values: Sequence[float | None]) -> tuple[float, float | None] | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return statistics.fmean(known), statistics.stdev(known) if known[1:] else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _plus_minus(spread: tuple[float, float | None] | None) -> str:
    if spread is None:
        return "-"
    mean, deviation = spread
    return f"{mean:.3f}" if deviation is None else f"{mean:.3f} ± {deviation:.3f}"


def _percent(spread: tuple[float, float | None] | None) -> str:
    return "-" if spread is None else f"{spread[0]:.1%}"


def draw_comparison(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Mean AP50 of each mixture of experts beside the first row's.

    Args:
        rows: As :func:`comparison_row` makes them.
            Those without a finished run are left out.
    """
    shown = [row for row in rows if row["ap50_seeds"]]
    figure = Figure(figsize=(7.5, 1.2 + 0.3 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(shown):
        values = row["ap50_seeds"]
        axes.plot(values, [place] * len(values), "o", color="#2a6f97", alpha=0.6)
        axes.plot(row["ap50"][0], place, "|", color="black", markersize=14)
    if shown:
        mean, deviation = shown[0]["ap50"]
        axes.axvline(mean, color="#b2603a", linewidth=1)
        if deviation is not None:
            reach = (mean - deviation, mean + deviation)
            axes.axvspan(*reach, color="#b2603a", alpha=0.15)
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(
        "mean AP50 (dots: seeds, bars: their mean, band: first row, mean and deviation)"
    )
    return figure
