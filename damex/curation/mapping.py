"""Assignment of datasets to experts: an integer program and its relaxation.

Global Expert Mapping (arXiv 2604.18842) assigns datasets before training to maximize
the sum of affinities under expert capacities. Its rounding of the relaxation, as
printed, fails on integral solutions; here scipy's solver (HiGHS) finds the optimum, and
the relaxation bounds it.

Axes: M datasets, N experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from math import comb

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

TOLERANCE = 1e-9
MAX_SETS = 20_000  # of medoids for exhaustive search


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
    number = len(affinity_MM)
    if comb(number, count) <= MAX_SETS:
        sets = combinations(range(number), count)
        return list(max(sets, key=partial(_score, affinity_MM)))
    chosen: list[int] = []
    for _ in range(count):
        rest = [one for one in range(number) if one not in chosen]
        gains = [_score(affinity_MM, [*chosen, one]) for one in rest]
        chosen.append(rest[int(np.argmax(gains))])
    return sorted(chosen)


def _score(affinity_MM: np.ndarray, medoids: Sequence[int]) -> float:
    """Sum over datasets of the affinity to the nearest medoid."""
    return round(float(affinity_MM[:, list(medoids)].max(axis=1).sum()), 12)


def least_capacity(sizes_M: np.ndarray, experts: int, slack: float) -> float:
    """Capacity per expert: ``slack`` times the even share, or more for a large dataset.

    Largest-first packing fits into it.
    """
    capacity = max(slack * sizes_M.sum() / experts, sizes_M.max())
    loads = np.zeros(experts)
    for size in sorted(sizes_M, reverse=True):
        loads[loads.argmin()] += size
    return float(max(capacity, loads.max()))
