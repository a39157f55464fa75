"""The study as a whole: training, theory, figure.

Axes: B samples, P patches, D numbers in a patch, K clusters, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from damex.moe import TopKGate
from studies.chen2022.models import (
    NUM_CLUSTERS,
    NUM_EXPERTS,
    NUM_FILTERS,
    PATCH_DIMS,
    draw_setting,
)
from studies.chen2022.rows import (
    BOUND,
    ENTROPY_GAP,
    NAMES,
    TOLERANCE,
    mixture_rows,
    reason_rows,
    single_rows,
)
from studies.chen2022.training import (
    CURVE_STRIDE,
    EXPERT_LR,
    ROUTER_LR,
    Case,
    Outcome,
    Plan,
    accuracy,
    make_plan,
    train_mixture,
    train_single,
)
from studies.cluster_data import NUM_PATCHES, ClusterSamples, ClusterTask
from studies.harness import Session, seeded
from studies.report import NO_CLAIM, Row, StudyResult, unjudged

TITLE = (
    "Chen et al. 2022, Towards understanding the mixture-of-experts layer in deep "
    "learning (arXiv 2208.02813)"
)
THEORY_SAMPLES = 16_000
LEMMA_EXPERTS = (2, NUM_EXPERTS)
LEMMA_DISTANCE = 0.05
LEMMA_PAIRS = 5


def run(session: Session) -> StudyResult:
    """Run the study: Tables 1, 3 to 9, Theorem 4.1 and Lemma 5.1."""
    plan = make_plan(session)
    theory = theory_rows(plan.draws)
    found, reasons = (
        _train(cases, plan.num, session) for cases in (plan.cases, plan.reasons)
    )
    accuracies = {
        single: train_single(single, plan.num, steps=plan.single_steps)
        for single in session.track(plan.singles, "train single models")
    }
    trained = [
        *mixture_rows(found),
        *single_rows(plan, accuracies, found),
        *reason_rows(reasons),
    ]
    rows = [*(unjudged(trained) if session.quick else trained), *theory]
    return StudyResult(
        title=TITLE,
        rows=rows,
        figure=_figure(found),
        settings=_settings(plan),
        remark=NO_CLAIM if session.quick else remark(rows),
    )


def _train(
    cases: Mapping[Case, range], num: int, session: Session
) -> dict[Case, list[Outcome]]:
    jobs = [(case, seed) for case, seeds in cases.items() for seed in seeds]
    return session.run(
        jobs, lambda case, seed: train_mixture(case, num, seed), "train mixtures"
    )


def theory_rows(draws: int) -> list[Row]:
    """Theorem 4.1 is sharp, and Lemma 5.1 holds for the gate."""
    with seeded(0):
        generator = torch.Generator().manual_seed(0)
        task = draw_setting("verify", generator)
        samples = task.draw(THEORY_SAMPLES, generator)
        best = accuracy(additive_margin(task, samples), samples.labels_B)
        even_E = routing_shares(torch.zeros(NUM_EXPERTS), draws)
        ratios = {
            num: smoothness(
                num_experts=num, distance=LEMMA_DISTANCE, pairs=LEMMA_PAIRS, draws=draws
            )
            for num in LEMMA_EXPERTS
        }
    share = 1 / NUM_EXPERTS
    allowed = 5.0 * (share * (1.0 - share) / draws) ** 0.5
    off = (even_E - share).abs().max().item()
    return [
        Row(
            "best sum over patches, accuracy, %",
            f"<= {BOUND} (Theorem 4.1)",
            [best],
            f"within {TOLERANCE} of {BOUND}: the bound is attained",
            abs(best - BOUND) <= TOLERANCE,
            "constructed, setting verify",
            digits=2,
        ),
        Row(
            f"|P(route) - 1/{NUM_EXPERTS}| at h = 0",
            "0 (section 5)",
            [off],
            f"<= {allowed:.4f} (five deviations)",
            off <= allowed,
            "TopKGate in training",
            digits=4,
        ),
        *(
            Row(
                "change of routing over its bound, largest of five",
                "<= 1 (Lemma 5.1)",
                [max(values)],
                "<= 1",
                max(values) <= 1.0,
                f"TopKGate in training, {num} experts",
            )
            for num, values in ratios.items()
        ),
    ]


def remark(rows: Sequence[Row]) -> str:
    """Settings in which experts divide the clusters as in the paper."""
    firm = [row.settings for row in rows if row.name == ENTROPY_GAP and row.holds]
    if not firm:
        return ""
    finding = "Cubic experts separate the clusters and linear ones do not"
    return f"{finding}: {'; '.join(firm)}."


def _settings(plan: Plan) -> dict[str, object]:
    return {
        "clusters": NUM_CLUSTERS,
        "patches": NUM_PATCHES,
        "dimensions": PATCH_DIMS,
        "training and test samples": f"{plan.num} each, new for every seed",
        "experts": NUM_EXPERTS,
        "filters of an expert": NUM_FILTERS,
        "step of experts": EXPERT_LR,
        "learning rate of the router": ROUTER_LR,
        "entropy": "of training data with noise (official_code) or of test data "
        "without noise (paper), unless stated in the row",
    }


# Signs of two features can be told apart in 7 of 8 equally likely cases. With these
# sizes w_k of +-v_k and b_k of c_k all eighths but one come out right for every pair
# k < l of clusters: |b_k| < w_k - w_l < b_l, and |b_k| < w_k + w_l.
FEATURE_K = (15.5, 14.5, 13.0, 10.0)
CENTER_K = (0.0, 1.25, 2.75, 6.0)
THRESHOLD = 0.75  # under all signals of setting "verify", five deviations of noise


def additive_margin(task: ClusterTask, samples: ClusterSamples) -> Tensor:
    """A sum over patches of one function that attains the bound of Theorem 4.1.

    Positive where label 1 is predicted, for data of setting "verify". The bound would
    say nothing if trained models stayed far below it and nothing else came near.
    """
    feature_BPK = samples.patches_BPD @ task.signals_KD.t()
    center_BPK = samples.patches_BPD @ task.centers_KD.t()
    seen_BPK = feature_BPK.sign() * (feature_BPK.abs() > THRESHOLD)
    value_BP = seen_BPK @ torch.tensor(FEATURE_K)
    value_BP = value_BP + (center_BPK > THRESHOLD).float() @ torch.tensor(CENTER_K)
    return value_BP.sum(1)


def routing_shares(logits_E: Tensor, draws: int) -> Tensor:
    """How often the gate routes to each expert in training, over draws of its noise."""
    gate = TopKGate(1, noise="uniform")
    counts_E = gate(logits_E.expand(draws, -1)).counts_E
    return counts_E.double() / draws


def smoothness(
    *, num_experts: int, distance: float, pairs: int, draws: int
) -> list[float]:
    """|p - p'|_inf / (E^2 |h - h'|_inf) of random pairs (h, h'); <= 1 by Lemma 5.1."""
    ratios = []
    for _ in range(pairs):
        logits_E = torch.rand(num_experts)
        step_E = distance * (torch.randint(2, (num_experts,)) * 2.0 - 1.0)
        step_E[0], step_E[1] = distance, -distance
        change_E = routing_shares(logits_E, draws)
        change_E = change_E - routing_shares(logits_E + step_E, draws)
        ratios.append(change_E.abs().max().item() / (num_experts**2 * distance))
    return ratios


COLORS = {"identity": "#d95f02", "cubic": "#1b6ca8"}
STYLES = ("-", "--", ":", "-.")


def _figure(found: Mapping[Case, Sequence[Outcome]]) -> Figure:
    """Entropy over training in each form, and where clusters went."""
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
    """Lowest, mean and highest of curves; one that ended early stays where it was."""
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
