"""The comparison as a picture: every seed a dot, the first row a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

__all__ = ["draw_comparison"]


def draw_comparison(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Mean AP50 of each mixture of experts beside the first row's.

    Args:
        rows: As :func:`damex.analysis.comparison_table.comparison_row` makes them.
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
