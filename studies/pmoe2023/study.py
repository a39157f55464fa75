"""The study from pictures to report, and its figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.digits import DigitSource, uci_digits
from studies.harness import Session
from studies.pmoe2023.data import Task
from studies.pmoe2023.exact import exact_rows
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
from studies.pmoe2023.rows import learned_rows
from studies.pmoe2023.training import BATCH_SIZE, Job, run_job, run_wide
from studies.report import NO_CLAIM, StudyResult, draw_seeds, unjudged

NUM_TRAIN = 1100  # of UCI's 1,797 digits; no test picture is seen in training


def run(session: Session) -> StudyResult:
    """Run the study."""
    plan = QUICK if session.quick else FULL
    source = uci_digits(NUM_TRAIN, seed=0)
    seeds = session.seed_range(plan.seeds)
    results = _measure(plan, source, seeds, session)
    learned = list(learned_rows(results))
    if session.quick:
        learned = unjudged(learned)
    return StudyResult(
        title="pMoE (Chowdhury et al., ICML 2023, arXiv 2306.04073)",
        rows=[*exact_rows(source, seeds), *learned],
        figure=_draw(results),
        settings=_describe(plan, source),
        remark=NO_CLAIM if session.quick else "",
    )


def _measure(
    plan: Plan, source: DigitSource, seeds: Sequence[int], session: Session
) -> Results:
    def wide(case: tuple[bool, int], seed: int) -> float:
        epochs, test_samples = plan.wide_epochs, plan.test_samples
        return run_wide(*case, source, seed, epochs=epochs, test_samples=test_samples)

    jobs = [(job, seed) for seed in seeds for job in dict.fromkeys(plan.jobs())]
    cases = [
        ((experts, count), seed)
        for seed in seeds
        for count in plan.wide_samples
        for experts in (False, True)
    ]
    return Results(
        plan,
        session.run(
            jobs, lambda job, seed: run_job(job, source, seed), "two-layer networks"
        ),
        session.run(cases, wide, "wide residual networks"),
    )


def _describe(plan: Plan, source: DigitSource) -> dict[str, Any]:
    return {
        "patches from": source.name,
        "batch": BATCH_SIZE,
        "epochs at most": f"{plan.epochs}, or as stated in the row",
        "learning rate of pMoE": 0.2,
        "of CNNs, best on the test samples": " ".join(map(str, plan.rates)),
        "test samples": plan.test_samples,
    }


SAMPLES = "training samples"
ACCURACY = "test accuracy (%)"
_line = partial(draw_seeds, capsize=3)
STYLES = {
    "separate pMoE": dict(color="C0", marker="o"),
    "joint pMoE": dict(color="C1", marker="s"),
    "CNN-40": dict(color="C2", marker="^"),
    "CNN-4": dict(color="C3", marker="v"),
    "WRN-pMoE": dict(color="C1", marker="s"),
    "WRN": dict(color="C2", marker="^"),
}


def _draw(results: Results) -> Figure:
    """Draw all experiments; bars show one sample standard deviation over seeds."""
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
        label: [results.wide[experts, count] for count in counts]
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


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
