"""``damex data plan``: which datasets should share an expert, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import damex.registry  # noqa: F401  (keeps mmdet's import silent)
from damex.curation.dataset_features import (
    BACKBONE,
    PARTS,
    SAMPLES,
    DatasetFeatures,
    affinities,
    backbone_looks,
    can_use_backbone,
    colour_looks,
    read_features,
)
from damex.curation.mapping import choose_medoids, least_capacity, map_datasets
from damex.datasets.label_space import LabelSpace
from damex.datasets.spec import parse_mixture
from damex.engine.config_files import mixture_config_of
from damex.errors import ConfigError


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
    """Propose dataset groups for a config.

    Raises:
        ConfigError: If the mixture is invalid, or there is nothing to plan.
        DataError: If a dataset cannot be read.
    """
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
    rules = cfg.get("label_space") or "union"
    space = LabelSpace.from_specs(specs, mode=rules)
    with_backbone = can_use_backbone()
    look = backbone_looks() if with_backbone else colour_looks
    found = [
        read_features(spec, [*held.values()], look)
        for spec, held in zip(specs, space.dataset_classes, strict=True)
    ]
    weights = [
        one.images if spec.weight is None else spec.weight
        for spec, one in zip(specs, found, strict=True)
    ]
    shares = np.array(weights) / sum(weights)
    near = affinities(found)
    made = propose(found, shares, near["all"], experts=experts, slack=capacity)
    looks = f"features of {BACKBONE}" if with_backbone else "colours and edges"
    print(
        f"{experts} experts for {len(specs)} datasets, each for {made.capacity:.0%} of "
        f"the samples or less.\nCompared: {looks} of up to {SAMPLES} training images, "
        "sizes and shapes of boxes, and names of classes (1 is the same).\n"
    )
    print("\n".join(table(made, found, shares, near)))


def propose(
    found: Sequence[DatasetFeatures],
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
        members = [found[i].name for i in np.flatnonzero(plan_M == number)]
        if members:
            groups[found[medoid].name] = members
    value = float(affinity_MN[np.arange(len(found)), plan_M].sum())
    return ExpertPlan(groups, capacity, value, bound)


def table(
    made: ExpertPlan,
    found: Sequence[DatasetFeatures],
    shares_M: np.ndarray,
    near: Mapping[str, Any],
) -> list[str]:
    """The groups with reasons (``near``: :func:`affinities`), and lines to paste."""
    names = [one.name for one in found]
    width = max(len("dataset"), *map(len, names))
    head = "  ".join(f"{part:>7}" for part in ("samples", "all", *PARTS))
    lines = [f"{'group':{width}}  {'dataset':{width}}  {head}"]
    for group, members in made.groups.items():
        stands = names.index(group)
        for name in members:
            place = names.index(name)
            numbers = [near[part][place, stands] for part in ("all", *PARTS)]
            row = "  ".join(f"{number:7.2f}" for number in numbers)
            lines.append(
                f"{group:{width}}  {name:{width}}  {shares_M[place]:7.1%}  {row}"
            )
    lines += [
        "",
        f"Sum of 'all': {made.value:.3f}; {made.bound:.3f} if datasets could be "
        "divided. The plan is the best there is for these numbers, which are a guess "
        "at what should share weights: edit it.",
        "",
        "To accept it, add to the entries of the mixture:",
    ]
    for group, members in made.groups.items():
        lines += [f"  {name}: group={group!r}," for name in members if len(members) > 1]
    return lines
