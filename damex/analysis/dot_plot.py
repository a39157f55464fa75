"""The picture of a comparison: a row per method, a dot per seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from damex.analysis.intervals import spread


def dot_plot(rows: Mapping[str, Sequence[float | None]], *, score: str) -> Figure:
    """Draw scores of every row beside the first row's.

    Args:
        rows: Scores by name, one per seed, None where a run has not finished. Rows
            without any are left out.
        score: What the scores are, for the axis.

    Returns:
        A figure with a dot per seed, a bar at each row's mean, and a band at mean and
        sample deviation of the first row.
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
