"""Which mixtures and faults are measured: the lines of the table, seed by seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from damex.moe import ExpertCapacity
from studies.cluster_data import SETTINGS, draw_task
from studies.damex2023.faults import (
    Routing,
    capacity_curve,
    label_accuracy,
    targets_accuracy,
)
from studies.damex2023.mixing import (
    Method,
    Mixing,
    Outcome,
    draw_mixture,
    evaluate,
    train,
)
from studies.harness import Session

NUM_CLASSES = 8  # of the classifier, one cluster each
TEST_SEED = 1000  # added to the seed of a run
METHODS: tuple[Method, ...] = ("vanilla", "damex")


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        shared: Whether disturbances come from all data sets, as in `draw_mixture`.
        num_datasets: G.
        method: 'vanilla' or 'damex'.
        num_experts: E.
        longer: Factor on the steps of the plan.
    """

    shared: bool
    num_datasets: int
    method: Method
    num_experts: int
    longer: int = 1


# One expert with a data set to itself, and as many filters and samples as a mixture.
ALONE = Case(shared=False, num_datasets=1, method="damex", num_experts=1)


def growing_cases(cases: Iterable[Case], method: Method, *, shared: bool) -> list[Case]:
    """Those with more and more data sets and all else the same, in this order."""
    mixed = [case for case in cases if case != ALONE]
    fewest = min(case.num_experts for case in mixed)
    wanted = (shared, method, fewest, 1)
    found = [
        case
        for case in mixed
        if (case.shared, case.method, case.num_experts, case.longer) == wanted
    ]
    return sorted(found, key=lambda case: case.num_datasets)


def cases_with_more_experts(cases: Iterable[Case], method: Method) -> list[Case]:
    """Those of the largest mixture with more experts than the other mixtures have."""
    mixed = [case for case in cases if case != ALONE]
    fewest = min(case.num_experts for case in mixed)
    found = [c for c in mixed if c.method == method and c.num_experts > fewest]
    return sorted(found, key=lambda case: case.num_experts)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is run.

    Attributes:
        mixing: Sizes of the mixtures.
        datasets: Numbers of data sets.
        kinds: Which mixtures: disturbances shared or not.
        longer: Factors on the steps, for DAMEX on the largest mixture whose data sets
            disturb themselves.
        more_experts: Further numbers of experts for the largest mixture whose data sets
            disturb themselves; both methods. All experts together have as many filters
            as in `mixing`.
        seeds: Of the mixtures; the faults take the same.
        router_steps: Steps of a router in the demonstrations.
        label_steps: Steps of a classifier.
        tokens: Tokens of an image from which a router learns.
    """

    mixing: Mixing
    datasets: Sequence[int]
    kinds: Sequence[bool]
    longer: Sequence[int]
    more_experts: Sequence[int]
    seeds: Sequence[int]
    router_steps: int = 300
    label_steps: int = 200
    tokens: int = 32


@dataclass(frozen=True, eq=False)
class Faults:
    """The three faults of one seed.

    Attributes:
        targets: By number of data sets and whether the released layout was used.
        curves: `capacity_curve` with the released capacity (True) and without.
        labels: Accuracy by whether labels are mapped by name and tokens are marked.
    """

    targets: Mapping[tuple[int, bool], Routing]
    curves: Mapping[bool, Sequence[tuple[float, float]]]
    labels: Mapping[tuple[bool, bool], float]


def measure_mixing(plan: Plan, session: Session) -> dict[Case, list[Outcome]]:
    """Train and test both methods on all mixtures, and one expert on one data set."""

    def measure(case: Case, seed: int) -> Outcome:
        mixing = _sizes(plan.mixing, case)
        generator = torch.Generator().manual_seed(TEST_SEED + seed)
        task = draw_mixture(
            mixing, case.num_datasets, shared=case.shared, generator=generator
        )
        model = train(task, mixing, case.method, seed=seed)
        return evaluate(model, task.draw(mixing.num_samples, generator), mixing)

    jobs = [(case, seed) for seed in plan.seeds for case in _cases(plan)]
    return session.run(jobs, measure, "mixtures of data sets")


def _sizes(mixing: Mixing, case: Case) -> Mixing:
    """More experts share the same number of filters, so parameters stay the same."""
    filters = mixing.num_experts * mixing.hidden_dims
    return replace(
        mixing,
        num_experts=case.num_experts,
        hidden_dims=filters // case.num_experts,
        steps=mixing.steps * case.longer,
    )


def _cases(plan: Plan) -> list[Case]:
    usual = plan.mixing.num_experts
    cases = [
        Case(shared, number, method, usual)
        for shared in plan.kinds
        for number in plan.datasets
        for method in METHODS
    ]
    most = max(plan.datasets)
    cases += [
        Case(False, most, method, number)
        for number in plan.more_experts
        for method in METHODS
    ]
    cases += [Case(False, most, "damex", usual, factor) for factor in plan.longer]
    return [*cases, ALONE]


def measure_faults(plan: Plan, seed: int) -> Faults:
    """Measure the faults of the released code and their corrections."""
    generator = torch.Generator().manual_seed(TEST_SEED + seed)
    mixing = plan.mixing
    many = max(plan.datasets)
    tasks = {
        number: draw_mixture(mixing, number, shared=False, generator=generator)
        for number in {2, many}
    }
    classes = draw_task(
        SETTINGS["1"], generator, num_clusters=NUM_CLASSES, dims=mixing.dims
    )
    return Faults(
        targets={
            (number, released): targets_accuracy(
                task,
                released=released,
                steps=plan.router_steps,
                num_tokens=plan.tokens,
                seed=seed,
            )
            for number, task in tasks.items()
            for released in (False, True)
        },
        curves={
            limited: capacity_curve(
                tasks[many],
                capacity=ExpertCapacity(factor=1.25) if limited else None,
                steps=plan.router_steps,
                every=max(plan.router_steps // 10, 1),
                seed=seed,
            )
            for limited in (False, True)
        },
        labels={
            (by_name, marked): label_accuracy(
                classes,
                by_name=by_name,
                marked=marked,
                steps=plan.label_steps,
                seed=seed,
            )
            for by_name in (False, True)
            for marked in (False, True)
        },
    )
