"""Seeds for samples: the same augmentation wherever and whenever a sample is made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class SeededIndex(int):
    """An ``int`` index with the seed for everything random about this sample.

    With it, augmentation depends on the place of a sample in the run and not on the
    number of workers, on their history, or on whether the run was resumed.
    """

    seed: int

    def __new__(cls, index: int, seed: int) -> SeededIndex:
        """Make an index with its seed."""
        value = super().__new__(cls, index)
        value.seed = seed
        return value

    def __reduce__(self) -> tuple[type[SeededIndex], tuple[int, int]]:
        return SeededIndex, (int(self), self.seed)


def mix_seed(*parts: int) -> int:
    """One 32-bit seed from several integers, well mixed.

    Example:
        >>> mix_seed(0, 1) != mix_seed(1, 0)
        True
    """
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


@contextmanager
def local_seed(seed: int) -> Iterator[None]:
    """Seed random, numpy and torch for a while and put their states back after."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    # torch.manual_seed would also reseed every GPU, whose states are not put back.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
