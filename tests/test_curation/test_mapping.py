"""Datasets to experts: the best plan under capacities."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from damex.curation.mapping import (
    choose_medoids,
    least_capacity,
    map_datasets,
    relax,
)


def brute_force(affinity, sizes, capacity):
    """Value of the best plan of all; None where none fits."""
    count, experts = affinity.shape
    values = [
        sum(affinity[i, j] for i, j in enumerate(plan))
        for plan in product(range(experts), repeat=count)
        if all(
            sum(sizes[i] for i in range(count) if plan[i] == j) <= capacity[j] + 1e-9
            for j in range(experts)
        )
    ]
    return max(values) if values else None


@pytest.mark.parametrize("seed", range(40))
def test_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    count, experts = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    affinity, sizes = rng.random((count, experts)), rng.random(count) + 0.1
    capacity = np.full(experts, rng.uniform(0.9, 1.6) * sizes.sum() / experts)
    expected = brute_force(affinity, sizes, capacity)
    found = map_datasets(affinity, sizes, capacity)
    if expected is None:
        assert found is None
        return
    plan, bound = found
    assert affinity[np.arange(count), plan].sum() == pytest.approx(expected)
    assert bound >= expected - 1e-6
    loads = np.bincount(plan, weights=sizes, minlength=experts)
    assert (loads <= capacity * (1 + 1e-8)).all()


def test_many_datasets_and_tight_capacities_have_a_plan():
    """Branch and bound in Python did not end here."""
    rng = np.random.default_rng(0)
    affinity, sizes = rng.random((20, 8)), rng.random(20) + 0.1
    capacity = np.full(8, least_capacity(sizes, 8, 1.1))
    plan, bound = map_datasets(affinity, sizes, capacity)
    value = affinity[np.arange(20), plan].sum()
    assert 0.95 * bound < value <= bound + 1e-6
    loads = np.bincount(plan, weights=sizes, minlength=8)
    assert (loads <= capacity * (1 + 1e-8)).all()


def test_the_relaxation_divides_datasets_and_the_plan_does_not():
    """Three datasets of 2 on two experts of 3 and 4: one has to be where it is not."""
    affinity = np.array([[1.0, 0.0], [0.9, 0.1], [0.8, 0.0]])
    sizes, capacity = np.full(3, 2.0), np.array([3.0, 4.0])
    shares, value = relax(affinity, sizes, capacity)
    assert (shares.max(axis=1) < 1).any()
    assert value == pytest.approx(1.0 + 0.4 + 0.1)  # half of the second or third
    plan, bound = map_datasets(affinity, sizes, capacity)
    assert plan.tolist() == [0, 1, 1]
    assert bound == pytest.approx(value)


def test_a_relaxation_that_is_whole_already_is_the_plan():
    """The printed rounding reads digits after the point, and finds none."""
    affinity = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    plan, bound = map_datasets(affinity, np.ones(3), np.array([2.0, 2.0]))
    assert plan.tolist() == [0, 0, 1]
    assert bound == pytest.approx(3.0)


@pytest.mark.parametrize("seed", range(10))
def test_rows_may_come_in_any_order(seed):
    rng = np.random.default_rng(seed)
    affinity, sizes = rng.random((6, 3)), rng.random(6) + 0.2
    capacity = np.full(3, 1.3 * sizes.sum() / 3)
    found = map_datasets(affinity, sizes, capacity)
    order = rng.permutation(6)
    other = map_datasets(affinity[order], sizes[order], capacity)
    if found is None:
        assert other is None
    else:
        assert found[0][order].tolist() == other[0].tolist()


def test_what_does_not_fit_is_no_plan():
    assert map_datasets(np.ones((2, 1)), np.ones(2), np.array([1.5])) is None
    # By weight it would: 3 + 3 + 2 on two experts of 4, but none is divided.
    sizes = np.array([3.0, 3.0, 2.0])
    assert map_datasets(np.ones((3, 2)), sizes, np.full(2, 4.0)) is None
    assert least_capacity(sizes, 2, slack=1.0) == 5.0
    assert map_datasets(np.ones((3, 2)), sizes, np.full(2, 5.0)) is not None


def test_medoids_are_the_middles_of_groups():
    # Positions on a line: two groups and a loner.
    places = np.array([0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 30.0])
    affinity = np.exp(-np.abs(places[:, None] - places))
    assert choose_medoids(affinity, 3) == [1, 4, 6]
    assert choose_medoids(affinity, 7) == list(range(7))


def test_medoids_of_many_datasets_are_found_one_by_one():
    places = np.arange(40) // 4 * 10.0
    affinity = np.exp(-np.abs(places[:, None] - places))
    assert choose_medoids(affinity, 10) == list(range(0, 40, 4))
