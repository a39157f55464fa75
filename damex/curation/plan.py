"""``damex data plan``: which datasets should share an expert, and why.

Global Expert Mapping (arXiv 2604.18842) assigns datasets before training to maximize
the sum of affinities under expert capacities. Its rounding of the relaxation, as
printed, fails on integral solutions; here scipy's solver (HiGHS) finds the optimum, and
the relaxation bounds it.

Axes: M datasets, N experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from damex.curation.dataset_features import (
    BACKBONE,
    PARTS,
    SAMPLES,
    affinities,
    backbone_features,
    can_use_backbone,
    color_features,
    read_features,
)
from damex.curation.sources import mixture_config_of
from damex.datasets.label_space import LabelSpace
from damex.datasets.spec import parse_mixture
from damex.errors import ConfigError, printable

TOLERANCE = 1e-9
MAX_SETS = 20_000  # of medoids for exhaustive search


@dataclass(frozen=True)
class ExpertPlan:
    """Datasets that share experts.

    Args:
        groups: Representative dataset of each expert -> all of its datasets.
        capacity: Maximum share of the samples per expert.
        value: Sum of the affinities of datasets to their representatives.
        bound: Upper bound of the value, with divided datasets.
    """

    groups: Mapping[str, Sequence[str]]
    capacity: float
    value: float
    bound: float


def plan(
    config: str, *, cfg_options: Sequence[str], experts: int | None, capacity: float
) -> None:
    """Propose dataset groups for a config."""
    cfg = mixture_config_of(config, cfg_options)
    specs = parse_mixture(cfg["mixture"])
    experts = experts or (len(specs) + 1) // 2
    if not experts < len(specs):
        raise ConfigError(
            f"plan: {experts} experts for {len(specs)} datasets leave nothing to plan: "
            "without group=... each dataset has an expert of its own. Give fewer by "
            "--experts."
        )
    if not capacity >= 1:
        raise ConfigError(f"--capacity must be 1 or more, got {capacity}.")
    space = LabelSpace.from_specs(specs, mode=cfg.get("label_space") or "union")
    with_backbone = can_use_backbone()
    features_of = backbone_features() if with_backbone else color_features
    found = [
        read_features(spec, [*held.values()], features_of)
        for spec, held in zip(specs, space.dataset_classes, strict=True)
    ]
    weights = [
        one.images if spec.weight is None else spec.weight
        for spec, one in zip(specs, found, strict=True)
    ]
    shares_M = np.array(weights) / sum(weights)
    near = affinities(found)
    names = [one.name for one in found]
    made = propose(names, shares_M, near["all"], experts=experts, slack=capacity)
    looks = f"features of {BACKBONE}" if with_backbone else "colours and edges"
    print(
        f"{experts} experts for {len(specs)} datasets, each for {made.capacity:.0%} of "
        f"the samples or less.\nCompared: {looks} of up to {SAMPLES} training images, "
        "sizes and shapes of boxes, and names of classes (1 is the same).\n"
    )
    print(printable("\n".join(_table(made, names, shares_M, near))))


def _table(
    made: ExpertPlan,
    names: Sequence[str],
    shares_M: np.ndarray,
    near: Mapping[str, np.ndarray],
) -> list[str]:
    """The groups with reasons (``near``: :func:`affinities`), and lines to paste."""
    width = max(len("dataset"), *map(len, names))
    head = "  ".join(f"{part:>7}" for part in ("samples", "all", *PARTS))
    lines = [f"{'group':{width}}  {'dataset':{width}}  {head}"]
    paste = []
    for group, members in made.groups.items():
        for name in members:
            pair = names.index(name), names.index(group)
            row = "  ".join(f"{near[part][pair]:7.2f}" for part in ("all", *PARTS))
            share = f"{shares_M[pair[0]]:7.1%}"
            lines.append(f"{group:{width}}  {name:{width}}  {share}  {row}")
            if len(members) > 1:
                paste.append(f"  {name}: group={group!r},")
    return [
        *lines,
        "",
        f"Sum of 'all': {made.value:.3f}; {made.bound:.3f} if datasets could be "
        "divided. The plan is the best there is for these numbers, which are a guess "
        "at what should share weights: edit it.",
        "",
        "To accept it, add to the entries of the mixture:",
        *paste,
    ]


def propose(
    names: Sequence[str],
    shares_M: np.ndarray,
    affinity_MM: np.ndarray,
    *,
    experts: int,
    slack: float,
) -> ExpertPlan:
    """Plan under the least capacity that fits all datasets.

    ``shares_M`` are shares of the samples; ``slack`` is the minimum capacity of an
    expert in even shares.
    """
    medoids = choose_medoids(affinity_MM, experts)
    capacity = least_capacity(shares_M, experts, slack)
    affinity_MN = affinity_MM[:, medoids]
    solved = map_datasets(affinity_MN, shares_M, np.full(experts, capacity))
    if solved is None:  # largest-first packing always fits
        raise RuntimeError("the datasets do not fit into a capacity that they fit into")
    plan_M, bound = solved
    groups: dict[str, list[str]] = {}
    for number, medoid in enumerate(medoids):
        if members := [names[i] for i in np.flatnonzero(plan_M == number)]:
            groups[names[medoid]] = members
    value = float(affinity_MN[np.arange(len(names)), plan_M].sum())
    return ExpertPlan(groups, capacity, value, bound)


def map_datasets(
    affinity_MN: np.ndarray, sizes_M: np.ndarray, capacity_N: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """The best expert for each dataset, under capacities.

    Independent of the order of rows, up to swaps of equal rows.

    Args:
        affinity_MN: Affinity of datasets and experts.
        sizes_M: Capacity that each dataset uses.
        capacity_N: Capacity of each expert.

    Returns:
        Experts, integers (M,), and the upper bound by the relaxation; None if
        infeasible.
    """
    order = np.lexsort((*affinity_MN.T, -sizes_M))  # ties do not depend on the order
    given = affinity_MN[order], sizes_M[order], capacity_N
    divided, whole = relax(*given), relax(*given, whole=True)
    if divided is None or whole is None:
        return None
    experts_M = np.empty(len(order), dtype=int)
    experts_M[order] = whole[0].argmax(axis=1)
    return experts_M, divided[1]


def relax(
    affinity_MN: np.ndarray,
    sizes_M: np.ndarray,
    capacity_N: np.ndarray,
    *,
    whole: bool = False,
) -> tuple[np.ndarray, float] | None:
    """Linear relaxation of :func:`map_datasets`; exact with ``whole``.

    Returns:
        Shares (M, N), whose rows sum to 1, and their value; None if infeasible.
    """
    count, experts = affinity_MN.shape
    each_dataset = np.kron(np.eye(count), np.ones(experts))
    load = np.kron(sizes_M, np.eye(experts))
    found = milp(
        -affinity_MN.ravel(),
        integrality=int(whole),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(each_dataset, 1, 1),
            LinearConstraint(load, ub=capacity_N * (1 + TOLERANCE)),
        ],
        options=dict(mip_rel_gap=0.0),  # the default stops 1e-4 short of the best
    )
    if found.x is None:
        return None
    return found.x.reshape(count, experts), -float(found.fun)


def choose_medoids(affinity_MM: np.ndarray, count: int) -> list[int]:
    """Select ``count`` datasets, in rising order, with the largest sum of affinities.

    The sum is over datasets to their nearest medoid. Greedy beyond ``MAX_SETS`` sets.
    """

    def score(medoids: Iterable[int]) -> float:
        return round(float(affinity_MM[:, list(medoids)].max(axis=1).sum()), 12)

    number = len(affinity_MM)
    if math.comb(number, count) <= MAX_SETS:
        return list(max(combinations(range(number), count), key=score))
    chosen: list[int] = []
    for _ in range(count):
        rest = [one for one in range(number) if one not in chosen]
        chosen.append(max(rest, key=lambda one: score([*chosen, one])))
    return sorted(chosen)


def least_capacity(sizes_M: np.ndarray, experts: int, slack: float) -> float:
    """Capacity per expert: ``slack`` times the even share, or more for a large dataset.

    Largest-first packing fits into it.
    """
    capacity = max(slack * sizes_M.sum() / experts, sizes_M.max())
    loads = np.zeros(experts)
    for size in sorted(sizes_M, reverse=True):
        loads[loads.argmin()] += size
    return float(max(capacity, loads.max()))
