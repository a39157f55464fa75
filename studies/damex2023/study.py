"""The study: mixtures of data sets, the released faults, and what holds exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.damex2023.exact import exact_rows
from studies.damex2023.mixing import Method, Mixing, Outcome
from studies.damex2023.plan import (
    ALONE,
    METHODS,
    Case,
    Faults,
    Plan,
    cases_with_more_experts,
    growing_cases,
    measure_faults,
    measure_mixing,
)
from studies.damex2023.rows import fault_rows, mixing_rows, remark
from studies.harness import Session
from studies.report import StudyResult, draw_seeds

SEEDS = 5


def run(session: Session) -> StudyResult:
    """Run the study."""
    plan = _plan(session)
    outcomes = measure_mixing(plan, session)
    seeds = session.track(plan.seeds, "released faults")
    faults = [measure_faults(plan, seed) for seed in seeds]
    rows = [
        *mixing_rows(outcomes),
        *fault_rows(faults),
        *exact_rows(plan.seeds),
    ]
    mixing = plan.mixing
    return StudyResult(
        title="DAMEX (Jain et al. 2023, arXiv 2311.04894)",
        rows=rows,
        figure=_figure(outcomes, faults),
        settings={
            "experts": f"{mixing.num_experts} unless stated in the row",
            "cubic filters of all experts": mixing.num_experts * mixing.hidden_dims,
            "clusters per data set": mixing.clusters,
            "training samples": mixing.num_samples,
            "steps of Adam": mixing.steps,
            "batch": mixing.batch_size,
            "learning rate": mixing.lr,
        },
        remark=remark(outcomes, faults),
    )


def _plan(session: Session) -> Plan:
    if session.quick:
        return Plan(
            mixing=Mixing(steps=120, batch_size=256, num_samples=3000),
            datasets=(2, 8),
            kinds=(False, True),
            longer=(),
            more_experts=(32,),
            seeds=session.seed_range(1),
            router_steps=100,
            label_steps=60,
            tokens=16,
        )
    return Plan(
        mixing=Mixing(),
        datasets=(2, 4, 8),
        kinds=(False, True),
        longer=(4,),
        more_experts=(16, 32),
        seeds=session.seed_range(SEEDS),
    )


COLORS: Mapping[Method, str] = {"vanilla": "#b2603a", "damex": "#2a6f97"}
NAMES: Mapping[Method, str] = {"vanilla": "vanilla MoE", "damex": "DAMEX"}


def _figure(
    outcomes: Mapping[Case, Sequence[Outcome]], faults: Sequence[Faults]
) -> Figure:
    """Accuracy by number of data sets, who goes where, and what a capacity drops."""
    figure = Figure(figsize=(16.5, 6.4), layout="constrained")
    axes = figure.subplots(2, 4)
    for row, shared in enumerate((False, True)):
        _draw_accuracy(axes[row, 0], outcomes, shared=shared)
    _draw_experts(axes[0, 1], outcomes)
    _draw_drops(axes[1, 1], faults)
    for row, method in enumerate(METHODS):
        most = growing_cases(outcomes, method, shared=True)[-1]
        counts_GE = outcomes[most][0].counts_GE
        share = (counts_GE / counts_GE.sum(1, keepdim=True)).numpy()
        image = axes[row, 2].imshow(share, vmin=0, vmax=1, cmap="Blues")
        axes[row, 2].set(title=f"{NAMES[method]}: where samples go", xlabel="expert")
        axes[row, 2].set_ylabel("data set")
        figure.colorbar(image, ax=axes[row, 2], label="share of the data set")
    _draw_targets(axes[0, 3], faults)
    _draw_labels(axes[1, 3], faults)
    return figure


def _draw_accuracy(
    axes: Axes, outcomes: Mapping[Case, Sequence[Outcome]], *, shared: bool
) -> None:
    for method in METHODS:
        cases = growing_cases(outcomes, method, shared=shared)
        numbers = [case.num_datasets for case in cases]
        _draw_curve(axes, numbers, [outcomes[case] for case in cases], method)
        axes.set_xticks(numbers)
    where = "any data set" if shared else "the same data set"
    axes.set(
        title=f"disturbed by signals of {where}",
        xlabel=f"data sets mixed ({cases[-1].num_experts} experts)",
        ylabel="test accuracy (%)",
    )
    axes.legend()


def _draw_experts(axes: Axes, outcomes: Mapping[Case, Sequence[Outcome]]) -> None:
    """The largest mixture that disturbs itself, with more and more experts."""
    for method in METHODS:
        first = growing_cases(outcomes, method, shared=False)[-1]
        cases = [first, *cases_with_more_experts(outcomes, method)]
        numbers = [case.num_experts for case in cases]
        _draw_curve(axes, numbers, [outcomes[case] for case in cases], method)
    alone = float(np.mean([o.accuracy for o in outcomes[ALONE]]))
    axes.axhline(alone, color="0.4", ls="--", lw=1, label="one expert, one data set")
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set(
        title="disturbed by signals of the same data set",
        xlabel=f"experts ({first.num_datasets} data sets of 4 clusters)",
        ylabel="test accuracy (%)",
    )
    axes.legend()


def _draw_curve(
    axes: Axes,
    numbers: Sequence[int],
    found: Sequence[Sequence[Outcome]],
    method: Method,
) -> None:
    values = [[o.accuracy for o in outcomes] for outcomes in found]
    style = dict(color=COLORS[method], marker="o", label=NAMES[method])
    draw_seeds(axes, numbers, values, **style)


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


def _draw_targets(axes: Axes, faults: Sequence[Faults]) -> None:
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


def _draw_labels(axes: Axes, faults: Sequence[Faults]) -> None:
    for offset, (marked, color) in enumerate(((False, "#9fb8c8"), (True, "#2a6f97"))):
        means = [
            np.mean([found.labels[by_name, marked] for found in faults])
            for by_name in (False, True)
        ]
        places = np.arange(2) + 0.4 * offset - 0.2
        label = f"tokens {'show' if marked else 'do not show'} their data set"
        axes.bar(places, means, 0.4, color=color, label=label)
    axes.set_xticks(range(2), ["own numbers (released)", "labels by name"])
    axes.set(
        title="same classes, numbered differently",
        ylabel="class accuracy (%)",
        ylim=(0, 125),
    )
    axes.legend(loc="upper center")
