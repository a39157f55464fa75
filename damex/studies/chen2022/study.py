"""The study as a whole: plan, training, rows, conclusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from damex.studies.chen2022.data import NUM_CLUSTERS, PATCH_DIMS, draw_setting
from damex.studies.chen2022.figure import make_figure
from damex.studies.chen2022.plan import Plan, make_plan, run_cases, run_singles
from damex.studies.chen2022.recipes import NUM_EXPERTS, NUM_FILTERS
from damex.studies.chen2022.rows import (
    BOUND,
    ENTROPY_GAP,
    TOLERANCE,
    mixture_rows,
    reason_rows,
    single_rows,
)
from damex.studies.chen2022.theory import additive_margin, routing_shares, smoothness
from damex.studies.chen2022.training import EXPERT_LR, ROUTER_LR, accuracy
from damex.studies.cluster_data import NUM_PATCHES
from damex.studies.progress import StudyProgress
from damex.studies.result import Row, StudyResult, StudySettings

__all__ = ["conclude", "run", "theory_rows"]

TITLE = (
    "Chen et al. 2022, Towards understanding the mixture-of-experts layer in deep "
    "learning (arXiv 2208.02813)"
)
THEORY_SAMPLES = 16_000
LEMMA_EXPERTS = (2, NUM_EXPERTS)
LEMMA_DISTANCE = 0.05
LEMMA_PAIRS = 5


def run(settings: StudySettings, progress: StudyProgress) -> StudyResult:
    """Runs the study on damex's layer, gate, losses, optimiser and metrics.

    Args:
        settings: How much to run.
        progress: Shows how far it is.

    Returns:
        Rows for Tables 1, 3 to 9, Theorem 4.1 and Lemma 5.1. A quick run makes no
        claim about the values of trained models.
    """
    plan = make_plan(settings)
    theory = theory_rows(plan.draws)
    found = run_cases(plan.cases, plan.num, progress)
    reasons = run_cases(plan.reasons, plan.num, progress)
    accuracies = run_singles(plan, progress)
    trained = [
        *mixture_rows(found),
        *single_rows(plan, accuracies, found),
        *reason_rows(reasons),
    ]
    if settings.quick:
        trained = [replace(row, holds=None) for row in trained]
    rows = [*trained, *theory]
    return StudyResult(
        title=TITLE,
        rows=rows,
        conclusion=conclude(rows),
        figure=make_figure(found),
        settings=_settings(plan),
    )


def theory_rows(draws: int) -> list[Row]:
    """Theorem 4.1 is sharp, and Lemma 5.1 holds for the gate.

    Args:
        draws: Draws of noise for each estimate.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
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
    rows = [
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
    ]
    for num, values in ratios.items():
        row = Row(
            "change of routing over its bound, largest of five",
            "<= 1 (Lemma 5.1)",
            [max(values)],
            "<= 1",
            max(values) <= 1.0,
            f"TopKGate in training, {num} experts",
        )
        rows.append(row)
    return rows


def conclude(rows: Sequence[Row]) -> str:
    """Says which claims hold, from the rows alone.

    Args:
        rows: Of the study.
    """
    judged = [row for row in rows if row.holds is not None]
    failed = [row for row in judged if not row.holds]
    gaps = [row for row in rows if row.name == ENTROPY_GAP]
    firm = [row.settings for row in gaps if row.holds]
    text = f"{len(judged) - len(failed)} of {len(judged)} claims hold."
    if firm:
        text += (
            " Cubic experts separate the clusters and linear ones do not: "
            f"{'; '.join(firm)}."
        )
    if failed:
        names = [f"{row.name} ({row.settings}: {row.measured()})" for row in failed]
        text += " Not confirmed: " + "; ".join(names) + "."
    return text


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
        "without noise (paper), unless the row says otherwise",
    }
