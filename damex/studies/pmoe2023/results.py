"""Everything that was measured, with the look-ups that rows and figure share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from damex.studies.pmoe2023.jobs import Filters, Job, Outcomes, Task
from damex.studies.pmoe2023.plan import Plan
from damex.studies.pmoe2023.wide_runs import WideRuns

__all__ = ["GOAL", "Results", "minus"]

GOAL = 95.0  # test accuracy, in percent, that the paper counts samples for


@dataclass(frozen=True)
class Results:
    """Measurements of one run of the study.

    Attributes:
        plan: What was run.
        embed_dims: Pixels of a patch.
        outcomes: Of the two-layer networks.
        wide: Of the wide residual networks.
        wrong_counts: By seed, see `selection_errors`.
        sum_errors: By seed, see there.
        router_errors: By seed, see `closed_form_error`.
    """

    plan: Plan
    embed_dims: int
    outcomes: Outcomes
    wide: WideRuns
    wrong_counts: Sequence[int]
    sum_errors: Sequence[float]
    router_errors: Sequence[float]

    def accuracies(self, job: Job) -> list[float]:
        """Test accuracies of a job by seed, in percent.

        Args:
            job: One that was run.
        """
        return [outcome.accuracy for outcome in self.outcomes[job]]

    def mean(self, job: Job) -> float:
        """Mean test accuracy of a job, in percent.

        Args:
            job: One that was run.
        """
        return statistics.fmean(self.accuracies(job))

    def best_cnn(
        self,
        filters: Filters,
        count: int,
        task: Task | None = None,
        *,
        epochs: int | None = None,
    ) -> Job:
        """The learning rate with which a CNN did best on the test samples.

        Choosing in hindsight favours the CNN: no pMoE gets a choice.

        Args:
            filters: Its size.
            count: Training samples.
            task: As in `Plan.pmoe`.
            epochs: As in `Plan.cnn`.
        """
        return max(self.plan.cnn(filters, count, task, epochs=epochs), key=self.mean)

    def reaches_goal(self, jobs: Sequence[Job]) -> int | None:
        """Fewest training samples with which the mean accuracy is `GOAL`.

        Args:
            jobs: The same network with more and more samples.
        """
        counts = [job.num_samples for job in jobs if self.mean(job) >= GOAL]
        return min(counts, default=None)


def minus(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Differences seed by seed.

    Args:
        first: Values by seed.
        second: Values of the same seeds.
    """
    return [a - b for a, b in zip(first, second, strict=True)]
