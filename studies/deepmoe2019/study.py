"""The study: lambda, stages, operations and widening on digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from studies.deepmoe2019.measures import (
    EMBEDDING_WIDTHS,
    WEAK_EMBEDDING_WIDTHS,
    Measured,
    Plan,
    measure_all,
)
from studies.deepmoe2019.network import Recipe, draw_digits
from studies.deepmoe2019.rows import (
    CHOSEN,
    PLAIN,
    Found,
    accuracy_of,
    active_of,
    all_rows,
    left_of,
    patterns_of,
)
from studies.harness import Session
from studies.report import StudyResult

SEEDS = 5


def run(session: Session) -> StudyResult:
    """Run the study."""
    plan = _plan(session)
    found = measure_all(plan, session)
    num_images = len(draw_digits(seed=0).test)
    recipe, deep = plan.recipe, plan.vgg_recipe
    return StudyResult(
        title="DeepMoE (Wang et al. 2019, arXiv 1806.01531)",
        rows=all_rows(found),
        figure=_figure(found, num_images=num_images),
        settings={
            "training images": plan.num_train,
            "test images": num_images,
            "epochs": f"{recipe.joint_epochs} + {recipe.frozen_epochs}",
            "epochs of VGG": f"{deep.joint_epochs} + {deep.frozen_epochs}",
            "widths of VGG divided by": plan.vgg_divisor,
            "batch": recipe.batch_size,
            "learning rate of SGD": recipe.lr,
            "learning rate of VGG": deep.lr,
            "lambda of VGG": deep.l1_weight,
            "widths of the embedding": EMBEDDING_WIDTHS,
            "of the weak one": WEAK_EMBEDDING_WIDTHS,
        },
        remark=_remark(found),
    )


def _plan(session: Session) -> Plan:
    if session.quick:
        return Plan(
            seeds=session.seed_range(1),
            l1_weights=(0.0, 1e-3, 1e-1),
            strategies=("W1-Mid",),
            vgg_divisor=16,
            recipe=Recipe(joint_epochs=6, frozen_epochs=2),
            other_recipes={},
            vgg_recipe=Recipe(joint_epochs=2, frozen_epochs=1, lr=0.02),
            num_train=600,
            num_flop_images=20,
        )
    return Plan(
        seeds=session.seed_range(SEEDS),
        l1_weights=(0.0, 1e-4, 1e-3, 1e-2, 1e-1),
        strategies=("W1-High", "W1-Mid", "W4-Low", "W13-All"),
        vgg_divisor=8,
        recipe=Recipe(),
        other_recipes={
            "learning rate 0.02": Recipe(lr=0.02),
            "twice the epochs": Recipe(joint_epochs=60, frozen_epochs=20),
        },
        vgg_recipe=Recipe(joint_epochs=15, frozen_epochs=5, lr=0.02),
    )


def _remark(found: Found) -> str:
    """What the gates save and cost, and how much of the answer is in them."""
    chosen = found[CHOSEN]
    active, patterns, left, accuracy = (
        fmean(map(value, chosen))
        for value in (active_of, patterns_of, left_of, accuracy_of)
    )
    plain = fmean(map(accuracy_of, found[PLAIN]))
    blank = fmean(one.final.blank_accuracy for one in chosen)
    verdict = "nearly all" if accuracy - blank < 5.0 else "not all"
    return (
        f"At lambda 0.001 {active:.0f} % of the channels are open, in {patterns:.0f} "
        f"patterns, and skipping the others leaves {left:.0f} % of the operations at "
        f"{accuracy:.1f} % accuracy against {plain:.1f} % of the plain network. The "
        f"gates alone, with a blank image, reach {blank:.1f} %: {verdict} that the "
        "network knows is in them."
    )


BLUE, ORANGE = "#2a6f97", "#b2603a"


def _figure(found: Found, *, num_images: int) -> Figure:
    """Error by active channels, gate patterns by lambda, error by operations."""
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
