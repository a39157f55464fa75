"""Which expert for which dataset: an integer program and its relaxation.

Global Expert Mapping (arXiv 2604.18842) plans ahead of the training: datasets go to
experts so that the sum of affinities is largest and no expert gets more than its
capacity. The linear relaxation lets a dataset be divided. Its rounding as printed
there, by the binary digits of the solution, answers nothing where it is whole already
(the digits of 1 are all 0). Here scipy's solver (HiGHS) finds the best plan there is,
and the relaxation says how far any plan is from what dividing would give.

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
MAX_SETS = 20_000  # of medoids that are all tried


def map_datasets(
    affinity_MN: np.ndarray, sizes_M: np.ndarray, capacity_N: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """The best expert for each dataset, under capacities.

    Rows in another order give the answer in that order; equal rows may swap theirs.

    Args:
        affinity_MN: How well a dataset and an expert go together.
        sizes_M: What a dataset takes of an expert's capacity.
        capacity_N: What an expert can take.

    Returns:
        The expert of each dataset, integers (M,), and the value of the relaxation,
        which no plan can exceed; None where no plan respects the capacities.
    """
    order = np.lexsort((*affinity_MN.T, -sizes_M))  # ties do not hang on the order
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
    """Divide datasets among experts: the linear relaxation.

    Args:
        affinity_MN: See :func:`map_datasets`.
        sizes_M: See there.
        capacity_N: See there.
        whole: Whether no dataset may be divided.

    Returns:
        Shares (M, N), rows with a sum of 1, and their value; None where there are none.
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
    """Datasets that stand for the experts: each dataset is near to one of them.

    Args:
        affinity_MM: Between datasets.
        count: How many.

    Returns:
        Positions in rising order: the set with the largest sum of best affinities, or,
        where there are too many sets, what is gained most by one after the other.
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
    """What each expert may take, at the least.

    Args:
        sizes_M: Of the datasets, which are not divided.
        experts: N.
        slack: Times the even share; more where a dataset is larger.

    Returns:
        The same number for every expert; largest-first packing fits into it.
    """
    capacity = max(slack * sizes_M.sum() / experts, sizes_M.max())
    loads = np.zeros(experts)
    for size in sorted(sizes_M, reverse=True):
        loads[loads.argmin()] += size
    return float(max(capacity, loads.max()))
