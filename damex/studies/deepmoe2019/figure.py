"""The figure of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from damex.studies.deepmoe2019.measurements import Case, Measured

__all__ = ["draw_figure"]

BLUE, ORANGE = "#2a6f97", "#b2603a"
Found = Mapping[Case, Sequence[Measured]]


def draw_figure(found: Found, *, num_images: int) -> Figure:
    """Error by active channels, gate patterns by lambda, error by operations.

    Args:
        found: By case.
        num_images: Test images.
    """
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    sweep = {
        float(case[1]): networks
        for case, networks in found.items()
        if case[0] == "sweep"
    }
    _draw_active(axes[0], sweep, found["plain", "32"])
    _draw_patterns(axes[1], sweep, num_images)
    _draw_operations(axes[2], found)
    return figure


def _draw_active(
    axes: Axes,
    sweep: Mapping[float, Sequence[Measured]],
    plain: Sequence[Measured],
) -> None:
    colors = colormaps["viridis"](np.linspace(0.0, 0.9, len(sweep)))
    for color, (weight, networks) in zip(colors, sweep.items(), strict=True):
        active = [one.final.active for one in networks]
        label = f"$\\lambda$ = {weight:g}"
        axes.scatter(active, _errors(networks), s=18, color=color, label=label)
    mean = float(np.mean(_errors(plain)))
    axes.axhline(mean, color=ORANGE, linestyle="--", label="plain network")
    axes.set(
        title="digits, three convolutions of 32 channels",
        xlabel="active channels (%)",
        ylabel="test error (%)",
        xscale="log",
        yscale="log",
    )
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.legend(fontsize=8)


def _draw_patterns(
    axes: Axes, sweep: Mapping[float, Sequence[Measured]], num_images: int
) -> None:
    places = np.arange(len(sweep))
    values = [[one.final.patterns for one in networks] for networks in sweep.values()]
    axes.bar(places, [np.mean(seeds) for seeds in values], color=BLUE)
    axes.axhline(num_images, color=ORANGE, linestyle="--", label="test images")
    axes.axhline(1, color="black", label="one static pattern")
    axes.set_xticks(places, [f"{weight:g}" for weight in sweep])
    axes.set(
        title="mixture of channels, not a pruned network",
        xlabel="$\\lambda$",
        ylabel="distinct gate patterns",
        yscale="log",
        ylim=(0.7, 10 * num_images),
    )
    axes.legend(loc="upper right")


def _draw_operations(axes: Axes, found: Found) -> None:
    for case, networks in found.items():
        if case[0] != "VGG":
            continue
        flops = np.array([one.flops for one in networks]) / 1e6
        color = "black" if case[1] == "plain" else None
        axes.scatter(flops, _errors(networks), s=16, color=color, label=case[1])
    axes.set(
        title="VGG-16 in small, gated and widened",
        xlabel="executed operations per image (million)",
        ylabel="test error (%)",
        xscale="log",
        yscale="log",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=8)


def _errors(networks: Sequence[Measured]) -> list[float]:
    return [100.0 - one.final.accuracy for one in networks]
