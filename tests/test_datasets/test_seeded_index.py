from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch

from damex.datasets.seeded_index import SeededIndex, local_seed, mix_seed


def draw():
    """One number from each of the three global generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_is_an_index():
    index = SeededIndex(2, seed=99)
    assert index == 2
    assert "abcd"[index] == "c"
    assert index.seed == 99


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy])
def test_copies_keep_the_seed(clone):
    assert clone(SeededIndex(2, 99)).seed == 99


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_with_its_seed(protocol):
    found = pickle.loads(pickle.dumps([SeededIndex(2, 99)], protocol))[0]
    assert type(found) is SeededIndex
    assert (found, found.seed) == (2, 99)


def test_mix_seed_depends_on_every_part_and_on_their_order():
    parts = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 2, 3), (3, 2, 1)]
    seeds = [mix_seed(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seeds == [mix_seed(*p) for p in parts]


def test_mix_seed_separates_neighbours():
    # 3,000 seeds of 32 bits: 0.001 collisions are expected by chance.
    seeds = {mix_seed(0, e, p) for e in range(3) for p in range(1000)}
    assert len(seeds) == 3000


def test_local_seed_repeats_all_three_generators():
    with local_seed(5):
        first = draw()
    with local_seed(5):
        second = draw()
    with local_seed(6):
        third = draw()
    assert first == second
    assert all(a != b for a, b in zip(first, third, strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_local_seed_puts_the_global_states_back(fails):
    with local_seed(1):  # keeps this test itself from changing the global state
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        undisturbed = draw(), draw()
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        first = draw()
        try:
            with local_seed(5):
                draw()
                if fails:
                    raise KeyError
        except KeyError:
            pass
        assert (first, draw()) == undisturbed
