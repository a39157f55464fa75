"""Seeds for samples: augmentation that is reproducible for any number of workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class SeededIndex(int):
    """An ``int`` index with the seed for everything random about this sample.

    Augmentation then depends on the position of a sample in the run, not on the number
    and history of workers or on resumption.
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
    """Hash several integers into one 32-bit seed."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


@contextmanager
def local_seed(seed: int) -> Iterator[None]:
    """Seed random, numpy and torch temporarily, then restore their states."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    # torch.manual_seed would also reseed every GPU, whose states are not restored.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
