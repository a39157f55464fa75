"""Which expert for which dataset: a linear program and its rounding.

Global Expert Mapping (arXiv 2604.18842) plans ahead of the training: datasets go to
experts so that the sum of affinities is largest and no expert gets more than its
capacity. The linear relaxation lets a dataset be divided. Its rounding as printed
there, by the binary digits of the solution, answers nothing where it is whole already
(the digits of 1 are all 0). Here the relaxation bounds a search: a dataset that is
divided is given to one expert after the other, and what cannot beat the best plan so
far is not followed. The answer is the best plan there is.

Axes: M datasets, N experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from math import comb

import numpy as np
from scipy.optimize import linprog

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
    order = np.lexsort((*affinity_MN.T, -sizes_M))  # large ones first
    search = _Search(affinity_MN[order], sizes_M[order], capacity_N)
    bound = search.run()
    if search.best is None or bound is None:
        return None
    experts_M = np.empty(len(order), dtype=int)
    experts_M[order] = search.best
    return experts_M, bound


class _Search:
    """Branch and bound on the linear relaxation.

    Args:
        affinity_MN: See :func:`map_datasets`, as for the rest.
        sizes_M: See there.
        capacity_N: See there.
    """

    def __init__(
        self, affinity_MN: np.ndarray, sizes_M: np.ndarray, capacity_N: np.ndarray
    ) -> None:
        self.affinity_MN = affinity_MN
        self.sizes_M = sizes_M
        self.capacity_N = capacity_N
        self.best: np.ndarray | None = None
        self._value = -np.inf

    def run(self) -> float | None:
        """Find the best plan; returns the value of the relaxation, if it has any."""
        return self._follow(np.ones_like(self.affinity_MN, dtype=bool))

    def _follow(self, allowed_MN: np.ndarray) -> float | None:
        """Solve the relaxation where some pairs are forbidden, and divide the rest."""
        solved = relax(self.affinity_MN, self.sizes_M, self.capacity_N, allowed_MN)
        if solved is None:
            return None
        shares_MN, value = solved
        if value <= self._value + TOLERANCE:
            return value
        divided = np.flatnonzero(shares_MN.max(axis=1) < 1 - 1e-6)
        if not len(divided):
            plan_M = shares_MN.argmax(axis=1)
            self.best = plan_M
            self._value = self.affinity_MN[np.arange(len(plan_M)), plan_M].sum()
            return value
        dataset = divided[0]  # the largest: it leaves the least freedom
        for expert in np.argsort(-shares_MN[dataset], kind="stable"):
            if allowed_MN[dataset, expert]:
                fixed_MN = allowed_MN.copy()
                fixed_MN[dataset] = False
                fixed_MN[dataset, expert] = True
                self._follow(fixed_MN)
        return value


def relax(
    affinity_MN: np.ndarray,
    sizes_M: np.ndarray,
    capacity_N: np.ndarray,
    allowed_MN: np.ndarray,
) -> tuple[np.ndarray, float] | None:
    """Divide datasets among experts: the linear relaxation.

    Args:
        affinity_MN: See :func:`map_datasets`.
        sizes_M: See there.
        capacity_N: See there.
        allowed_MN: False for pairs that are ruled out.

    Returns:
        Shares (M, N), rows with a sum of 1, and their value; None where there are none.
    """
    count, experts = affinity_MN.shape
    columns = np.arange(count * experts)
    each_dataset = np.zeros((count, count * experts))
    each_dataset[columns // experts, columns] = 1.0
    load = np.zeros((experts, count * experts))
    load[columns % experts, columns] = np.repeat(sizes_M, experts)
    found = linprog(
        -affinity_MN.ravel(),
        A_ub=load,
        b_ub=capacity_N * (1 + TOLERANCE),
        A_eq=each_dataset,
        b_eq=np.ones(count),
        bounds=np.column_stack([np.zeros(count * experts), allowed_MN.ravel()]),
        method="highs-ds",
    )
    if found.status != 0:
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
