"""The study from pictures to report.

One picture with small ones like figures 4 to 11 of the paper.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.digits import DigitSource, mnist_digits, sklearn_digits
from studies.harness import StudyProgress
from studies.pmoe2023.plan import (
    CNN,
    CNN_4,
    FULL,
    GOAL,
    JOINT,
    MULTI,
    MULTI_SEPARATE,
    QUICK,
    SEPARATE,
    SPURIOUS,
    Plan,
    Results,
)
from studies.pmoe2023.rows import (
    closed_form_error,
    exact_rows,
    learned_rows,
    selection_errors,
)
from studies.pmoe2023.training import BATCH_SIZE, Job, Task, run_jobs, run_wide
from studies.report import Row, StudyResult, StudySettings

__all__ = ["MNIST_FOLDER", "TITLE", "draw", "run"]

TITLE = "pMoE (Chowdhury et al., ICML 2023, arXiv 2306.04073)"
MNIST_FOLDER = Path("data/mnist")


def run(settings: StudySettings, progress: StudyProgress) -> StudyResult:
    """Runs the study.

    Args:
        settings: Full or quick.
        progress: Shown here.
    """
    plan = QUICK if settings.quick else FULL
    source = _source(quick=settings.quick)
    seeds = range(settings.seeds or plan.seeds)
    with torch.random.fork_rng(devices=[]):
        results = _measure(plan, source, seeds, progress)
    rows = [*exact_rows(results), *_unless_quick(learned_rows(results), settings.quick)]
    return StudyResult(
        title=TITLE,
        rows=rows,
        conclusion=conclude(rows, quick=settings.quick),
        figure=draw(results),
        settings=_describe(plan, source),
    )


def conclude(rows: Sequence[Row], *, quick: bool) -> str:
    """What was confirmed and what was not.

    Args:
        rows: Of the report.
        quick: Whether criteria of what training shows were left open.
    """
    claimed = [row for row in rows if row.holds is not None]
    failed = [
        f"{row.name} ({row.settings})" if row.settings else row.name
        for row in claimed
        if not row.holds
    ]
    held = len(claimed) - len(failed)
    text = f"{held} of {len(claimed)} criteria hold"
    text += f"; not confirmed: {'; '.join(failed)}." if failed else "."
    if quick:
        text += " The quick run makes no claim about accuracies."
    return text


def _measure(
    plan: Plan, source: DigitSource, seeds: Sequence[int], progress: StudyProgress
) -> Results:
    selection = [selection_errors(source, seed) for seed in seeds]
    return Results(
        plan=plan,
        embed_dims=source.train.images_SD.shape[1],
        wrong_counts=[wrong for wrong, _ in selection],
        sum_errors=[error for _, error in selection],
        router_errors=[closed_form_error(source, seed) for seed in seeds],
        outcomes=run_jobs(plan.jobs(), source, seeds, progress),
        wide=run_wide(
            plan.wide_samples,
            source,
            seeds,
            progress,
            epochs=plan.wide_epochs,
            test_samples=plan.test_samples,
        ),
    )


def _source(*, quick: bool) -> DigitSource:
    if not quick and MNIST_FOLDER.is_dir():
        return mnist_digits(MNIST_FOLDER)
    return sklearn_digits()


def _unless_quick(rows: Iterable[Row], quick: bool) -> list[Row]:
    """Accuracies of a quick run are shown and compared with nothing."""
    if not quick:
        return list(rows)
    return [dataclasses.replace(row, criterion="", holds=None) for row in rows]


def _describe(plan: Plan, source: DigitSource) -> dict[str, Any]:
    return {
        "patches from": source.name,
        "batch": BATCH_SIZE,
        "epochs at most": f"{plan.epochs}, or as the row says",
        "learning rate of pMoE": 0.2,
        "of CNNs, best on the test samples": " ".join(map(str, plan.rates)),
        "test samples": plan.test_samples,
    }


SAMPLES = "training samples"
ACCURACY = "test accuracy (%)"
STYLES = {
    "separate pMoE": dict(color="C0", marker="o"),
    "joint pMoE": dict(color="C1", marker="s"),
    "CNN-40": dict(color="C2", marker="^"),
    "CNN-4": dict(color="C3", marker="v"),
    "WRN-pMoE": dict(color="C1", marker="s"),
    "WRN": dict(color="C2", marker="^"),
}


def draw(results: Results) -> Figure:
    """Draws all experiments; bars show one sample standard deviation over seeds.

    Args:
        results: Measurements.
    """
    figure = Figure(figsize=(13, 15), layout="constrained")
    axes = figure.subplots(3, 3).flatten()
    _samples(axes[0], results)
    _phase(axes[1], results)
    _tokens(axes[2], results)
    _experts(axes[3], results)
    _separate_hits(axes[4], results)
    _joint_hits(axes[5], results)
    _task(axes[6], results, SPURIOUS, "Spurious patch, 95 % (as figure 11)")
    _task(axes[7], results, MULTI, "Four classes (as figure 12)")
    _wide(axes[8], results)
    return figure


def _samples(axes: Axes, results: Results) -> None:
    plan = results.plan
    lines: dict[str, list[list[float]]] = {
        "separate pMoE": [
            results.accuracies(plan.pmoe(SEPARATE, count)) for count in plan.samples
        ],
        "joint pMoE": [
            results.accuracies(plan.pmoe(JOINT, count)) for count in plan.samples
        ],
    }
    for filters, epochs in ((CNN, plan.long_epochs), (CNN_4, plan.epochs)):
        lines[f"CNN-{filters.num_filters}"] = [
            results.accuracies(results.best_cnn(filters, count, epochs=epochs))
            for count in plan.samples
        ]
    _lines(axes, plan.samples, lines)
    axes.axhline(GOAL, color="grey", linestyle=":", linewidth=1)
    _label(axes, "Accuracy against samples (figure 4)", SAMPLES, ACCURACY)


def _phase(axes: Axes, results: Results) -> None:
    plan = results.plan
    shares = [
        [
            statistics.fmean(
                value >= GOAL
                for value in results.accuracies(
                    plan.with_tokens(SEPARATE, tokens, count)
                )
            )
            for tokens in plan.phase_tokens
        ]
        for count in plan.phase_samples
    ]
    image = axes.imshow(
        shares, cmap="gray", vmin=0, vmax=1, origin="lower", aspect="auto"
    )
    axes.set_xticks(range(len(plan.phase_tokens)), map(str, plan.phase_tokens))
    axes.set_yticks(range(len(plan.phase_samples)), map(str, plan.phase_samples))
    axes.figure.colorbar(image, ax=axes, label=f"share of seeds with {GOAL:g} %")
    title = "Separate training, phase transition (figure 5)"
    _label(axes, title, "patches per expert l", SAMPLES)


def _tokens(axes: Axes, results: Results) -> None:
    plan = results.plan
    _sweep(axes, results, plan.tokens, partial(plan.with_tokens, JOINT))
    _label(axes, "Joint training (figure 7)", "patches per expert l", ACCURACY)


def _experts(axes: Axes, results: Results) -> None:
    plan = results.plan
    _sweep(axes, results, plan.experts, plan.with_experts)
    _label(axes, "Joint training (figure 6)", "experts k", ACCURACY)


def _separate_hits(axes: Axes, results: Results) -> None:
    plan = results.plan
    outcomes = [results.outcomes[plan.pmoe(SEPARATE, n)] for n in plan.samples]
    for top in outcomes[0][0].top:
        values = [[outcome.top[top] for outcome in cell] for cell in outcomes]
        _line(axes, plan.samples, values, label=f"top {top}", marker="o")
    axes.legend()
    _label(axes, "Separate router (figure 8)", SAMPLES, "pattern taken (%)")


def _joint_hits(axes: Axes, results: Results) -> None:
    plan = results.plan
    outcomes = [results.outcomes[plan.pmoe(JOINT, n)] for n in plan.samples]
    for label in range(2):
        values = [[outcome.largest[label] for outcome in cell] for cell in outcomes]
        _line(axes, plan.samples, values, label=f"o{label + 1}", marker="s")
    axes.legend()
    title = f"Joint router, l = {JOINT.num_tokens} (figure 9)"
    _label(axes, title, SAMPLES, "largest gate to one expert (%)")


def _task(axes: Axes, results: Results, task: Task, title: str) -> None:
    plan = results.plan
    separate = MULTI_SEPARATE if task == MULTI else SEPARATE
    lines: dict[str, list[list[float]]] = {}
    for count in plan.task_samples:
        for label, job in (
            ("separate pMoE", plan.pmoe(separate, count, task)),
            ("joint pMoE", plan.pmoe(JOINT, count, task)),
            ("CNN-40", results.best_cnn(CNN, count, task)),
        ):
            lines.setdefault(label, []).append(results.accuracies(job))
    _lines(axes, plan.task_samples, lines)
    _label(axes, title, SAMPLES, ACCURACY)


def _wide(axes: Axes, results: Results) -> None:
    counts = results.plan.wide_samples
    lines = {
        label: [results.wide.accuracy[experts, count] for count in counts]
        for label, experts in (("WRN-pMoE", True), ("WRN", False))
    }
    _lines(axes, counts, lines)
    _label(axes, "Wide residual networks (as figure 10)", SAMPLES, ACCURACY)


def _sweep(
    axes: Axes, results: Results, x: Sequence[int], job: Callable[[int, int], Job]
) -> None:
    """One line per number of training samples, the second argument of `job`."""
    for count in results.plan.sweep_samples:
        values = [results.accuracies(job(size, count)) for size in x]
        _line(axes, x, values, label=f"N = {count}", marker="s")
    axes.legend()


def _lines(
    axes: Axes, x: Sequence[int], lines: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    for label, values in lines.items():
        _line(axes, x, values, label=label, **STYLES[label])
    axes.legend()


def _line(
    axes: Axes,
    x: Sequence[int],
    values: Sequence[Sequence[float]],
    *,
    label: str,
    marker: str,
    color: str | None = None,
) -> None:
    means = [statistics.fmean(cell) for cell in values]
    spreads = [statistics.stdev(cell) if len(cell) > 1 else 0.0 for cell in values]
    axes.errorbar(x, means, spreads, label=label, marker=marker, color=color, capsize=3)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
