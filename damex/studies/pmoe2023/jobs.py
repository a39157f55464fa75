"""Trainings of two-layer networks: what is trained on what, and what comes of it.

Axes: B samples, N patches of a sample, T = B*N, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import nn

from damex.studies.digits import DigitImages
from damex.studies.pmoe2023.digits import DigitSource
from damex.studies.pmoe2023.hits import largest_hits, taken_hits, top_hits
from damex.studies.pmoe2023.models import PatchCNN, PatchMoE, Recipe
from damex.studies.pmoe2023.patch_data import PatchSamples, draw_samples
from damex.studies.pmoe2023.training import accuracy, fit, train_router
from damex.studies.progress import StudyProgress

__all__ = ["TOP", "Filters", "Job", "Outcome", "Outcomes", "Task", "run_jobs"]

TOP = (1, 2, 4, 6)  # of how many patches figure 8 asks whether the right one is there
TEST_SEED = 10_000  # far from the seeds of training samples


@dataclass(frozen=True)
class Task:
    """What has to be told apart; see `draw_samples`.

    Attributes:
        classes: The digit of each class.
        spurious: Share of the training samples whose second pattern agrees with the
            class; in tests it is one half, which tells nothing.
    """

    classes: tuple[int, ...] = (1, 0)
    spurious: float | None = None

    def train(self, source: DigitSource, count: int, seed: int) -> PatchSamples:
        """Training samples of one seed.

        Args:
            source: Pictures.
            count: Number of samples.
            seed: Equal seeds give equal samples.
        """
        return self._draw(source.train, count, seed, self.spurious)

    def test(self, source: DigitSource, count: int, seed: int) -> PatchSamples:
        """Test samples of one seed; see `train`.

        Args:
            source: Pictures.
            count: Number of samples.
            seed: Equal seeds give equal samples.
        """
        chance = None if self.spurious is None else 0.5
        return self._draw(source.test, count, TEST_SEED + seed, chance)

    def _draw(
        self, digits: DigitImages, count: int, seed: int, spurious: float | None
    ) -> PatchSamples:
        return draw_samples(
            digits, count, seed=seed, classes=self.classes, spurious=spurious
        )


@dataclass(frozen=True)
class Filters:
    """A CNN with `num_filters` hidden nodes."""

    num_filters: int
    filter_std: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training; equal jobs of two experiments are run once.

    Attributes:
        network: What is trained.
        num_samples: Training samples.
        epochs: At most; fewer when an epoch makes no training error.
        lr: Learning rate.
        task: What has to be told apart.
        test_samples: Number of test samples.
        router_epochs: Of a router that is trained on its own.
    """

    network: Recipe | Filters
    num_samples: int
    epochs: int
    lr: float = 0.2
    task: Task = field(default_factory=Task)
    test_samples: int = 1000
    router_epochs: int = 100


@dataclass(frozen=True)
class Outcome:
    """What came of a job with one seed.

    Attributes:
        accuracy: On test samples, in percent.
        train_accuracy: On the training samples at the end, in percent.
        epochs: That were needed.
        top: Of pMoE with an expert per class: percentage of test samples whose
            discriminative patch is among the first l of the class's own expert, by l.
        largest: Of other pMoE: percentage of each class's test samples whose
            discriminative patch has the largest gating value of one expert, the same
            for the whole class.
        taken: Of these: the same for patches that the expert takes at all.
    """

    accuracy: float
    train_accuracy: float
    epochs: int
    top: Mapping[int, float] = field(default_factory=dict)
    largest: tuple[float, ...] = ()
    taken: tuple[float, ...] = ()


Outcomes: TypeAlias = dict[Job, list[Outcome]]


def run_jobs(
    jobs: Iterable[Job],
    source: DigitSource,
    seeds: Sequence[int],
    progress: StudyProgress,
) -> Outcomes:
    """Trains every job with every seed.

    Args:
        jobs: What to train; repetitions are left out.
        source: Pictures.
        seeds: Seeds of samples, starting values and orders.
        progress: Shown here.
    """
    outcomes: Outcomes = {job: [] for job in jobs}
    pairs = [(job, seed) for seed in seeds for job in outcomes]
    for job, seed in progress.track(pairs, "two-layer networks"):
        outcomes[job].append(_run(job, source, seed))
    return outcomes


def _run(job: Job, source: DigitSource, seed: int) -> Outcome:
    train = job.task.train(source, job.num_samples, seed)
    test = job.task.test(source, job.test_samples, seed)
    # Starting values of a seed depend on no job that ran before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(job, train.patches_BND.shape[2])
    if isinstance(model, PatchMoE) and not model.recipe.joint:
        train_router(model, train, lr=job.lr, epochs=job.router_epochs)
    epochs = fit(model, train, lr=job.lr, epochs=job.epochs, seed=seed)
    outcome = Outcome(accuracy(model, test), accuracy(model, train), epochs)
    if not isinstance(model, PatchMoE):
        return outcome
    if model.recipe.joint:
        return replace(
            outcome, largest=largest_hits(model, test), taken=taken_hits(model, test)
        )
    return replace(outcome, top={count: top_hits(model, test, count) for count in TOP})


def _build(job: Job, embed_dims: int) -> nn.Module:
    num_classes = len(job.task.classes)
    if isinstance(job.network, Recipe):
        return PatchMoE(job.network, embed_dims=embed_dims, num_classes=num_classes)
    return PatchCNN(
        job.network.num_filters,
        embed_dims=embed_dims,
        num_classes=num_classes,
        filter_std=job.network.filter_std,
    )
