"""Which networks are trained on how many samples, and what was measured of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from studies.pmoe2023.data import Task
from studies.pmoe2023.models import Recipe
from studies.pmoe2023.training import Filters, Job, Outcome

GOAL = 95.0  # test accuracy, in percent, that the paper counts samples for
# Section 5.1: about as many parameters in each.
SEPARATE = Recipe(num_experts=2, num_filters=40, num_tokens=2, joint=False)
JOINT = Recipe(num_experts=8, num_filters=40, num_tokens=6, joint=True)
CNN = Filters(40)
# The released code: other starting values, a fixed second layer of signs, a mean over
# all patches, and a CNN with a tenth of the filters.
SEPARATE_CODE = replace(
    SEPARATE, router_std=0.1, filter_std=0.1, output="signs", pool="all"
)
JOINT_CODE = replace(JOINT, filter_std=0.01, pool="all")
CNN_4 = Filters(4, filter_std=0.1)

BINARY = Task()
SPURIOUS = Task(spurious=0.95)
MULTI = Task(classes=(1, 0, 2, 3))
MULTI_SEPARATE = replace(SEPARATE, num_experts=len(MULTI.classes))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of all experiments.

    Attributes:
        seeds: Number of seeds.
        samples: Training samples of figures 4, 8 and 9.
        fixed: Training samples of the rows that the paper gives in words.
        rates: Learning rates that the CNNs may choose from.
        epochs: At most, of every training.
        long_epochs: At most, for the CNNs of figure 4, which are slow to lose their
            last training errors.
        phase_samples: Training samples of figure 5.
        phase_tokens: Values of l of figure 5.
        tokens: Values of l of figure 7.
        experts: Values of k of figure 6.
        sweep_samples: Training samples of figures 6 and 7.
        task_samples: Training samples with spurious patches, and of four classes.
        wide_samples: Training samples of the wide residual networks.
        wide_epochs: At most, of these.
        test_samples: Test samples of a seed.
    """

    seeds: int
    samples: tuple[int, ...]
    fixed: int
    rates: tuple[float, ...]
    epochs: int
    long_epochs: int
    phase_samples: tuple[int, ...]
    phase_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    sweep_samples: tuple[int, ...]
    task_samples: tuple[int, ...]
    wide_samples: tuple[int, ...]
    wide_epochs: int
    test_samples: int = 1000

    def pmoe(self, recipe: Recipe, count: int, task: Task = BINARY) -> Job:
        """A pMoE, with the paper's learning rate."""
        return Job(
            network=recipe,
            num_samples=count,
            epochs=self.epochs,
            task=task,
            test_samples=self.test_samples,
        )

    def cnn(
        self,
        filters: Filters,
        count: int,
        task: Task = BINARY,
        *,
        epochs: int | None = None,
    ) -> list[Job]:
        """A CNN, with each of the learning rates."""
        return [
            Job(
                network=filters,
                num_samples=count,
                epochs=epochs or self.epochs,
                lr=rate,
                task=task,
                test_samples=self.test_samples,
            )
            for rate in self.rates
        ]

    def with_tokens(self, recipe: Recipe, num_tokens: int, count: int) -> Job:
        """A pMoE with another l."""
        return self.pmoe(replace(recipe, num_tokens=num_tokens), count)

    def with_experts(self, num_experts: int, count: int) -> Job:
        """A joint pMoE with another k and as many filters in all."""
        return self.pmoe(replace(JOINT, num_experts=num_experts), count)

    def jobs(self) -> Iterator[Job]:
        """All trainings of two-layer networks."""
        for count in self.samples:
            yield self.pmoe(SEPARATE, count)
            yield self.pmoe(JOINT, count)
            yield from self.cnn(CNN, count, epochs=self.long_epochs)
            yield from self.cnn(CNN_4, count)
        yield from self.cnn(CNN, self.fixed)
        yield self.pmoe(SEPARATE_CODE, self.fixed)
        yield self.pmoe(JOINT_CODE, self.fixed)
        for count in self.phase_samples:
            for tokens in self.phase_tokens:
                yield self.with_tokens(SEPARATE, tokens, count)
        for count in self.sweep_samples:
            for tokens in self.tokens:
                yield self.with_tokens(JOINT, tokens, count)
            for experts in self.experts:
                yield self.with_experts(experts, count)
        for count in self.task_samples:
            for task, recipe in ((SPURIOUS, SEPARATE), (MULTI, MULTI_SEPARATE)):
                yield self.pmoe(recipe, count, task)
                yield self.pmoe(JOINT, count, task)
                yield from self.cnn(CNN, count, task)


FULL = Plan(
    seeds=5,
    samples=(100, 300, 500, 1000),
    fixed=300,
    rates=(0.05, 0.2, 0.8),
    epochs=150,
    long_epochs=1000,
    phase_samples=(100, 300, 500, 700),
    phase_tokens=(1, 2, 4, 8),
    tokens=(1, 2, 4, 6, 8, 12, 16),
    experts=(2, 4, 8, 20),
    sweep_samples=(100, 300),
    task_samples=(300, 600),
    wide_samples=(100, 200, 400),
    wide_epochs=30,
)
QUICK = Plan(
    seeds=2,
    samples=(100, 300),
    fixed=300,
    rates=(0.2,),
    epochs=30,
    long_epochs=60,
    phase_samples=(100,),
    phase_tokens=(2, 8),
    tokens=(1, 6, 16),
    experts=(8, 20),
    sweep_samples=(100,),
    task_samples=(200,),
    wide_samples=(100,),
    wide_epochs=5,
    test_samples=500,
)


@dataclass(frozen=True)
class Results:
    """Measurements of one run of the study.

    Attributes:
        plan: What was run.
        outcomes: Of the two-layer networks, by seed.
        wide: Accuracies of the wide residual networks by seed, in percent, by whether
            there are experts and number of samples.
    """

    plan: Plan
    outcomes: Mapping[Job, Sequence[Outcome]]
    wide: Mapping[tuple[bool, int], Sequence[float]]

    def accuracies(self, job: Job) -> list[float]:
        """Test accuracies of a job by seed, in percent."""
        return [outcome.accuracy for outcome in self.outcomes[job]]

    def mean(self, job: Job) -> float:
        """Mean test accuracy of a job, in percent."""
        return fmean(self.accuracies(job))

    def best_cnn(
        self,
        filters: Filters,
        count: int,
        task: Task = BINARY,
        *,
        epochs: int | None = None,
    ) -> Job:
        """The learning rate with which a CNN did best on the test samples.

        Choosing in hindsight favours the CNN: no pMoE gets a choice.
        """
        return max(self.plan.cnn(filters, count, task, epochs=epochs), key=self.mean)

    def reaches_goal(self, jobs: Sequence[Job]) -> int | None:
        """Fewest training samples with a mean accuracy of `GOAL`; None if none."""
        counts = [job.num_samples for job in jobs if self.mean(job) >= GOAL]
        return min(counts, default=None)
