"""Errors against the sample size, one panel per case, with the theory's slopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from damex.studies.softmax_gating2025.cases import CASES
from damex.studies.softmax_gating2025.claims import CLAIMS
from damex.studies.softmax_gating2025.rates import median_curve
from damex.studies.softmax_gating2025.tables import Found

__all__ = ["rates_figure"]

COLUMNS = 4
STYLES = ("o-", "s-", "^-", "d-", "v-", "P-")


def rates_figure(curves: Mapping[str, tuple[Sequence[int], Found]]) -> Figure:
    """Medians over repetitions and seeds.

    Args:
        curves: Sample sizes of each case, and its errors for each seed.
    """
    rows = ceil(len(curves) / COLUMNS)
    figure = Figure(figsize=(4.2 * COLUMNS, 3.4 * rows), layout="constrained")
    for place, (name, (sizes, seeds)) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(rows, COLUMNS, place)
        _panel(axes, name, sizes, seeds)
    return figure


def _panel(axes: Axes, name: str, sizes: Sequence[int], seeds: Found) -> None:
    for style, claim in zip(STYLES, CLAIMS[name], strict=False):
        curves = [median_curve(seed[claim.quantity]) for seed in seeds]
        axes.loglog(sizes, np.median(curves, axis=0), style, ms=4, label=claim.label)
    low, high = axes.get_ylim()
    n = np.asarray(sizes, dtype=float)
    middle = np.sqrt(low * high)
    for power, style in ((-0.5, "--"), (-0.25, ":")):
        guide = middle * (n / np.sqrt(n[0] * n[-1])) ** power
        axes.loglog(n, guide, style, color="gray", label=f"slope {power:g}")
    axes.set_title(f"{name} ({CASES[name].loss})", fontsize=10)
    axes.set_xlabel("sample size n (observations)")
    axes.set_ylabel("median error (units of parameter or Y)")
    axes.legend(fontsize=6)
