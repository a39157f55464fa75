"""Figure 3 of the paper, and Tables 4 and 6 as pictures.

Axes: K clusters, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from damex.studies.chen2022.data import NUM_CLUSTERS
from damex.studies.chen2022.plan import Case
from damex.studies.chen2022.training import CURVE_STRIDE, Outcome

__all__ = ["entropy_band", "make_figure"]

NAMES = {"identity": "linear", "cubic": "cubic"}
COLORS = {"identity": "#d95f02", "cubic": "#1b6ca8"}
STYLES = ("-", "--", ":", "-.")


def make_figure(found: Mapping[Case, Sequence[Outcome]]) -> Figure:
    """Entropy over training in each form, and where clusters went.

    Args:
        found: Outcomes of all mixtures.
    """
    figure = Figure(figsize=(10.5, 7.2), layout="constrained")
    axes = figure.subplots(2, 2)
    plain = {case: outcomes for case, outcomes in found.items() if not case.balance}
    released = {c: o for c, o in plain.items() if c.recipe.as_released}
    printed = {
        c: o for c, o in plain.items() if not c.recipe.as_released and c.setting == "1"
    }
    _curves(
        axes[0, 0],
        {
            f"{NAMES[c.activation]}, setting {c.setting}": (c, o)
            for c, o in released.items()
            if c.setting in "12"
        },
        title="official_code, with noise (Figure 3)",
    )
    _curves(
        axes[0, 1],
        {f"{NAMES[c.activation]}, {c.recipe.name}": (c, o) for c, o in printed.items()},
        title="form of the paper, setting 1, without noise",
    )
    for ax, activation in zip(axes[1], ("cubic", "identity"), strict=True):
        case = next(
            c for c in released if c.setting == "1" and c.activation == activation
        )
        _dispatch(ax, found[case][0], activation)
    return figure


def entropy_band(
    curves: Sequence[Sequence[float]],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Lowest, mean and highest of curves; those that ended early stay where they were.

    Args:
        curves: One per seed, of any length above 0.
    """
    length = max(len(curve) for curve in curves)
    filled = np.array([[*c, *[c[-1]] * (length - len(c))] for c in curves])
    return filled.min(0), filled.mean(0), filled.max(0)


def _curves(
    ax: Axes,
    named: Mapping[str, tuple[Case, Sequence[Outcome]]],
    *,
    title: str,
) -> None:
    kinds: list[tuple[str, str]] = []
    for name, (case, outcomes) in named.items():
        kind = (case.recipe.name, case.setting)
        if kind not in kinds:
            kinds.append(kind)
        low, mean, high = entropy_band([outcome.curve for outcome in outcomes])
        color = COLORS[case.activation]
        style = STYLES[kinds.index(kind) % len(STYLES)]
        steps = CURVE_STRIDE * np.arange(len(mean))
        ax.plot(steps, mean, style, color=color, label=name)
        ax.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
    ax.axhline(np.log(NUM_CLUSTERS), color="gray", lw=0.8)
    ax.annotate("ln 4, clusters mixed", (0, np.log(NUM_CLUSTERS) + 0.02), fontsize=8)
    ax.set(
        title=title,
        xlabel="training steps",
        ylabel="dispatch entropy (nats)",
        ylim=(-0.05, 1.55),
    )
    ax.legend(fontsize=8)


def _dispatch(ax: Axes, outcome: Outcome, activation: str) -> None:
    counts_KE = outcome.last_KE.numpy()
    ax.imshow(counts_KE, cmap="Blues", aspect="auto")
    for (cluster, expert), count in np.ndenumerate(counts_KE):
        color = "white" if count > counts_KE.max() / 2 else "black"
        ax.text(expert, cluster, str(count), ha="center", va="center", color=color)
    ax.set(
        title=f"{NAMES[activation]}, samples by expert, {outcome.accuracy:.1f} %",
        xlabel="expert",
        ylabel="cluster",
        xticks=range(counts_KE.shape[1]),
        yticks=range(counts_KE.shape[0]),
    )
