"""The study: mixtures of data sets, the released faults, and what holds exactly."""

from __future__ import annotations

from damex.studies.damex2023.conclusion import conclusion
from damex.studies.damex2023.fault_rows import exact_rows, fault_rows
from damex.studies.damex2023.figure import draw_figure
from damex.studies.damex2023.measurements import (
    Plan,
    measure_faults,
    measure_mixing,
)
from damex.studies.damex2023.mixing import Mixing
from damex.studies.damex2023.mixing_rows import mixing_rows
from damex.studies.progress import StudyProgress
from damex.studies.result import StudyResult, StudySettings

__all__ = ["run"]

SEEDS = 5


def run(settings: StudySettings, progress: StudyProgress) -> StudyResult:
    """Runs the study.

    Args:
        settings: How much.
        progress: Told how far it is.
    """
    plan = _plan(settings)
    outcomes = measure_mixing(plan, progress)
    faults = measure_faults(plan, progress)
    rows = [
        *mixing_rows(outcomes),
        *fault_rows(faults),
        *exact_rows(plan.seeds),
    ]
    mixing = plan.mixing
    return StudyResult(
        title="DAMEX (Jain et al. 2023, arXiv 2311.04894)",
        rows=rows,
        conclusion=conclusion(outcomes, faults),
        figure=draw_figure(outcomes, faults),
        settings={
            "experts": f"{mixing.num_experts} unless the row says otherwise",
            "cubic filters of all experts": mixing.num_experts * mixing.hidden_dims,
            "clusters per data set": mixing.clusters,
            "training samples": mixing.num_samples,
            "steps of Adam": mixing.steps,
            "batch": mixing.batch_size,
            "learning rate": mixing.lr,
        },
    )


def _plan(settings: StudySettings) -> Plan:
    if settings.quick:
        return Plan(
            mixing=Mixing(steps=120, batch_size=256, num_samples=3000),
            datasets=(2, 8),
            kinds=(False, True),
            longer=(),
            more_experts=(32,),
            seeds=range(settings.seeds or 1),
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
        seeds=range(settings.seeds or SEEDS),
    )
