"""What a run consists of, and what comes out of it.

Full size on one thread: a cubic mixture takes about 18 s, a linear one 10 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from damex.studies.chen2022.data import draw_train_and_test
from damex.studies.chen2022.recipes import OFFICIAL, PAPER, PAPER_X10, Recipe
from damex.studies.chen2022.training import (
    Outcome,
    train_mixture,
    train_single,
)
from damex.studies.progress import StudyProgress
from damex.studies.result import StudySettings

__all__ = ["Case", "Plan", "Single", "make_plan", "run_cases", "run_singles"]

SEEDS = 5
ACTIVATIONS = ("identity", "cubic", "relu", "celu", "gelu", "tanh")


@dataclass(frozen=True)
class Case:
    """Mixtures that differ in their seed only."""

    recipe: Recipe
    setting: str
    activation: str
    balance: bool = False


@dataclass(frozen=True)
class Single:
    """A single model, trained once as in the paper."""

    setting: str
    activation: str
    num_filters: int = 128


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        num: Samples for training, and as many for test.
        cases: Mixtures with their seeds.
        singles: Single models.
        single_steps: Their steps; the code takes 801.
        draws: Draws of noise for Lemma 5.1.
    """

    num: int
    cases: Mapping[Case, range]
    singles: tuple[Single, ...]
    single_steps: int
    draws: int


def make_plan(settings: StudySettings) -> Plan:
    """The full plan, or a quick one with smaller data.

    Args:
        settings: Of the study.
    """
    if settings.quick:
        return _quick_plan(range(settings.seeds or 1))
    seeds = range(settings.seeds or SEEDS)
    both = ("identity", "cubic")
    cases = {Case(OFFICIAL, s, a): seeds for s in "1234" for a in both}
    cases |= {Case(OFFICIAL, s, "identity", balance=True): seeds for s in "1234"}
    cases |= {Case(r, "1", a): seeds for r in (PAPER_X10, PAPER) for a in both}
    singles = [Single(s, a) for s in ("1", "2", "verify") for a in ACTIVATIONS]
    singles += [Single(s, a) for s in "34" for a in both]
    singles += [Single(s, "identity", 512) for s in "1234"]
    singles += [Single(s, "cubic", 512) for s in "13"]
    return Plan(16_000, cases, tuple(singles), single_steps=250, draws=400_000)


def run_cases(plan: Plan, progress: StudyProgress) -> dict[Case, list[Outcome]]:
    """Trains all mixtures.

    Args:
        plan: What to run.
        progress: Shows how far it is.
    """
    jobs = [(case, seed) for case, seeds in plan.cases.items() for seed in seeds]
    found: dict[Case, list[Outcome]] = {case: [] for case in plan.cases}
    for case, seed in progress.track(jobs, "train mixtures"):
        outcome = train_mixture(
            case.recipe,
            draw_train_and_test(case.setting, plan.num, seed),
            activation=case.activation,
            seed=seed,
            balance=case.balance,
        )
        found[case].append(outcome)
    return found


def run_singles(plan: Plan, progress: StudyProgress) -> dict[Single, float]:
    """Trains all single models.

    Args:
        plan: What to run.
        progress: Shows how far it is.

    Returns:
        Accuracy on test data, per cent.
    """
    singles: Iterable[Single] = progress.track(plan.singles, "train single models")
    return {
        single: train_single(
            draw_train_and_test(single.setting, plan.num, seed=0),
            activation=single.activation,
            num_filters=single.num_filters,
            steps=plan.single_steps,
            seed=0,
        )
        for single in singles
    }


def _quick_plan(seeds: range) -> Plan:
    """Setting 1 with few samples: shows that all parts work."""
    both = ("identity", "cubic")
    recipes = [replace(r, steps=250) for r in (OFFICIAL, PAPER_X10)]
    cases = {Case(r, "1", a): seeds for r in recipes for a in both}
    cases[Case(recipes[0], "1", "identity", balance=True)] = seeds
    singles = (Single("3", "identity", 32), Single("3", "cubic", 32))
    return Plan(2000, cases, singles, single_steps=100, draws=50_000)
