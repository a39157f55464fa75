"""The study from pictures to report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from damex.studies.pmoe2023.checks import closed_form_error, selection_errors
from damex.studies.pmoe2023.digits import DigitSource, mnist_digits, sklearn_digits
from damex.studies.pmoe2023.figure import draw
from damex.studies.pmoe2023.jobs import run_jobs
from damex.studies.pmoe2023.plan import FULL, QUICK, Plan
from damex.studies.pmoe2023.results import Results
from damex.studies.pmoe2023.rows import exact_rows, learned_rows
from damex.studies.pmoe2023.training import BATCH_SIZE
from damex.studies.pmoe2023.wide_runs import run_wide
from damex.studies.progress import StudyProgress
from damex.studies.result import Row, StudyResult, StudySettings

__all__ = ["MNIST_FOLDER", "TITLE", "run"]

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
        wide=run_wide(plan, source, seeds, progress),
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
