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
PAPER_SEEDS = 10  # runs behind each mean of Tables 1 and 3
DATA_SEEDS = range(4)
LONG_STEPS = 2000
ACTIVATIONS = ("identity", "cubic", "relu", "celu", "gelu", "tanh")


@dataclass(frozen=True)
class Case:
    """Mixtures that differ in their seed only.

    Attributes:
        recipe: The form.
        setting: Key of `damex.studies.cluster_data.SETTINGS`.
        activation: Of the experts.
        balance: Whether to add the load balance loss.
        data_seed: Of the one set of data that all seeds share, as the authors' code has
            it; None for new data with each seed.
    """

    recipe: Recipe
    setting: str
    activation: str
    balance: bool = False
    data_seed: int | None = None

    @property
    def where(self) -> str:
        """What the report calls the setting."""
        text = f"{self.recipe.name}, setting {self.setting}"
        if self.data_seed is None:
            return text
        return f"{text}, all on the data of seed {self.data_seed}"


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
        reasons: Further mixtures, of which nothing is claimed: they tell why others are
            as they are.
        singles: Single models.
        single_steps: Their steps; the code takes 801.
        draws: Draws of noise for Lemma 5.1.
    """

    num: int
    cases: Mapping[Case, range]
    reasons: Mapping[Case, range]
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
    published = range(settings.seeds or PAPER_SEEDS)
    cases = {Case(OFFICIAL, s, a): published for s in "1234" for a in both}
    cases |= {Case(OFFICIAL, s, "identity", balance=True): seeds for s in "1234"}
    printed = (PAPER_X10, PAPER)
    cases |= {Case(r, s, a): seeds for r in printed for s in "1234" for a in both}
    reasons = {Case(OFFICIAL, "2", "cubic", data_seed=d): seeds for d in DATA_SEEDS}
    longer = replace(PAPER, name=f"paper, {LONG_STEPS} steps", steps=LONG_STEPS)
    reasons[Case(longer, "1", "cubic")] = seeds
    singles = [Single(s, a) for s in ("1", "2", "verify") for a in ACTIVATIONS]
    singles += [Single(s, a) for s in "34" for a in both]
    singles += [Single(s, a, 512) for a in both for s in "1234"]
    return Plan(
        num=16_000,
        cases=cases,
        reasons=reasons,
        singles=tuple(singles),
        single_steps=250,
        draws=400_000,
    )


def run_cases(
    cases: Mapping[Case, range], num: int, progress: StudyProgress
) -> dict[Case, list[Outcome]]:
    """Trains mixtures.

    Args:
        cases: Which, with their seeds.
        num: Samples for training, and as many for test.
        progress: Shows how far it is.
    """
    jobs = [(case, seed) for case, seeds in cases.items() for seed in seeds]
    found: dict[Case, list[Outcome]] = {case: [] for case in cases}
    for case, seed in progress.track(jobs, "train mixtures"):
        data_seed = seed if case.data_seed is None else case.data_seed
        outcome = train_mixture(
            case.recipe,
            draw_train_and_test(case.setting, num, data_seed),
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
    return Plan(
        num=2000,
        cases=cases,
        reasons={Case(recipes[0], "1", "cubic", data_seed=1): seeds},
        singles=(Single("3", "identity", 32), Single("3", "cubic", 32)),
        single_steps=100,
        draws=50_000,
    )
