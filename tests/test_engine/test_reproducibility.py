import random
from types import SimpleNamespace

import numpy as np
import torch

from damex.engine.reproducibility import IterationSeedHook


def draw(*, seed=3, rank=0, iteration=5):
    runner = SimpleNamespace(seed=seed, rank=rank, iter=iteration)
    IterationSeedHook().before_train_iter(runner, batch_idx=0)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_randomness_of_an_iteration_does_not_depend_on_what_was_before():
    first = draw()
    torch.rand(1000)
    random.random()
    assert draw() == first


def test_other_seeds_processes_and_iterations_draw_something_else():
    drawn = [draw(), draw(seed=4), draw(rank=1), draw(iteration=6)]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 4
