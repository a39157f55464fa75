"""The figure of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from damex.studies.damex2023.measurements import Case, Faults
from damex.studies.damex2023.mixing import Outcome

__all__ = ["draw_figure"]

COLORS: Mapping[str, str] = {"vanilla": "#b2603a", "damex": "#2a6f97"}
NAMES: Mapping[str, str] = {"vanilla": "vanilla MoE", "damex": "DAMEX"}


def draw_figure(
    outcomes: Mapping[Case, Sequence[Outcome]], faults: Sequence[Faults]
) -> Figure:
    """Accuracy by number of data sets, who goes where, and what a capacity drops.

    Args:
        outcomes: Of the mixtures.
        faults: Of the released code.
    """
    figure = Figure(figsize=(12.5, 6.4), layout="constrained")
    axes = figure.subplots(2, 3)
    for row, shared in enumerate((False, True)):
        _draw_accuracy(axes[row, 0], outcomes, shared=shared)
    most = max(case.num_datasets for case in outcomes)
    for row, method in enumerate(("vanilla", "damex")):
        chosen = [
            found[0].counts_GE
            for case, found in outcomes.items()
            if case.method == method and case.shared and case.num_datasets == most
        ]
        share = (chosen[0] / chosen[0].sum(1, keepdim=True)).numpy()
        image = axes[row, 1].imshow(share, vmin=0, vmax=1, cmap="Blues")
        axes[row, 1].set(title=f"{NAMES[method]}: where samples go", xlabel="expert")
        axes[row, 1].set_ylabel("data set")
        figure.colorbar(image, ax=axes[row, 1], label="share of the data set")
    _draw_drops(axes[0, 2], faults)
    _draw_labels(axes[1, 2], faults)
    return figure


def _draw_accuracy(
    axes: Axes, outcomes: Mapping[Case, Sequence[Outcome]], *, shared: bool
) -> None:
    for method, color in COLORS.items():
        cases = [c for c in outcomes if c.shared == shared and c.method == method]
        numbers = [case.num_datasets for case in cases]
        values = [[o.accuracy for o in outcomes[case]] for case in cases]
        means = [float(np.mean(seeds)) for seeds in values]
        spreads = [
            float(np.std(seeds, ddof=1)) if len(seeds) > 1 else 0.0 for seeds in values
        ]
        axes.errorbar(
            numbers, means, spreads, color=color, marker="o", label=NAMES[method]
        )
    where = "any data set" if shared else "the same data set"
    axes.set(
        title=f"disturbed by signals of {where}",
        xlabel="data sets mixed (8 experts)",
        ylabel="test accuracy (%)",
    )
    axes.set_xticks(sorted({case.num_datasets for case in outcomes}))
    axes.legend()


def _draw_drops(axes: Axes, faults: Sequence[Faults]) -> None:
    styles = ((True, "#b2603a", "capacity 1.25"), (False, "#2a6f97", "dropless"))
    for limited, color, name in styles:
        mean = np.array([found.curves[limited] for found in faults]).mean(axis=0)
        axes.plot(mean[:, 0], mean[:, 1], marker="o", color=color, label=name)
    axes.set(
        title="900 tokens of one data set per device",
        xlabel="tokens routed to their data set's expert (%)",
        ylabel="dropped tokens (%)",
        ylim=(-3, 100),
    )
    axes.legend()


def _draw_labels(axes: Axes, faults: Sequence[Faults]) -> None:
    names = ("aligned", "released")
    numbers = sorted({number for number, _ in faults[0].targets})
    for offset, (released, color) in enumerate(((False, "#2a6f97"), (True, "#b2603a"))):
        means = [
            np.mean([found.targets[number, released].confidence for found in faults])
            for number in numbers
        ]
        places = np.arange(len(numbers)) + 0.4 * offset - 0.2
        axes.bar(places, means, 0.4, color=color, label=f"{names[offset]} targets")
    axes.set_xticks(range(len(numbers)), [f"{number} data sets" for number in numbers])
    axes.set(
        title="router trained with two images per device",
        ylabel="probability of the own expert (%)",
        ylim=(0, 100),
    )
    axes.legend()
