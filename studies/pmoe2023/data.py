"""Samples of n patches: one shows the digit of the class, the others any other digit.

Axes: B samples, N patches of a sample, D pixels of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from studies.digits import DigitImages, DigitSource

GRID = 4  # patches down and across
NUM_PATCHES = GRID * GRID
TEST_SEED = 10_000  # far from the seeds of training samples


@dataclass(frozen=True, eq=False)
class PatchSamples:
    """Labelled samples (section 4.2 of the paper).

    Attributes:
        patches_BND: Patches, row by row.
        labels_B: int64, index of the class.
        position_B: int64, which patch is the class-discriminative one.
    """

    patches_BND: Tensor
    labels_B: Tensor
    position_B: Tensor

    def __len__(self) -> int:
        """B."""
        return len(self.labels_B)


@dataclass(frozen=True)
class Task:
    """A classification task.

    Attributes:
        classes: The digit of each class; o1 and o2 of the paper are 1 and 0.
        spurious: Share of the training samples whose second pattern agrees with the
            class; in tests it is one half, which tells nothing.
    """

    classes: tuple[int, ...] = (1, 0)
    spurious: float | None = None

    def train(self, source: DigitSource, count: int, seed: int) -> PatchSamples:
        """Training samples of one seed."""
        return self.draw(source.train, count, seed, self.spurious)

    def test(self, source: DigitSource, count: int, seed: int) -> PatchSamples:
        """Test samples of one seed; see `train`."""
        chance = None if self.spurious is None else 0.5
        return self.draw(source.test, count, TEST_SEED + seed, chance)

    def draw(
        self,
        digits: DigitImages,
        count: int,
        seed: int,
        spurious: float | None = None,
    ) -> PatchSamples:
        """Draw samples, as many of each class, give or take one.

        `spurious` is the probability with which one more patch shows the digit that
        goes with the class, 2 or 3; else it shows the other of the two. Other patches
        show any of the remaining digits. Raises ValueError if it is given for other
        classes than 1 and 0.
        """
        classes = self.classes
        if spurious is not None and classes != (1, 0):
            raise ValueError(
                f"Task.draw: spurious needs the classes (1, 0), got {classes}"
            )
        generator = torch.Generator().manual_seed(seed)
        taken = (*classes, 2, 3) if spurious is not None else classes
        others = [digit for digit in range(10) if digit not in {*taken, 0, 1}]
        rows_B = torch.arange(count)
        labels_B = torch.randperm(count, generator=generator) % len(classes)
        position_B = torch.randint(NUM_PATCHES, (count,), generator=generator)
        wanted_BN = torch.tensor(others)[
            torch.randint(len(others), (count, NUM_PATCHES), generator=generator)
        ]
        wanted_BN[rows_B, position_B] = torch.tensor(classes)[labels_B]
        if spurious is not None:
            step_B = torch.randint(1, NUM_PATCHES, (count,), generator=generator)
            agrees_B = torch.rand(count, generator=generator) < spurious
            wanted_BN[rows_B, (position_B + step_B) % NUM_PATCHES] = torch.where(
                agrees_B, 2 + labels_B, 3 - labels_B
            )
        index_BN = _pictures_of(digits.labels_S, wanted_BN, generator)
        patches_BND = digits.images_S1HW.flatten(1)[index_BN]
        return PatchSamples(patches_BND, labels_B, position_B)


def _pictures_of(
    labels_S: Tensor, wanted_BN: Tensor, generator: torch.Generator
) -> Tensor:
    """A random picture of each digit that is wanted."""
    index_BN = torch.empty_like(wanted_BN)
    for digit in wanted_BN.unique().tolist():
        candidates = (labels_S == digit).nonzero().squeeze(1)
        here_BN = wanted_BN == digit
        draw = torch.randint(
            len(candidates), (int(here_BN.sum()),), generator=generator
        )
        index_BN[here_BN] = candidates[draw]
    return index_BN
