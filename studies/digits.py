"""Pictures of UCI's handwritten digits.

Axes: S pictures, H and W their height and width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from damex.workbench.toydata import load_digits

DIGIT_SIDE = 8  # pixels of UCI's digits, height and width


@dataclass(frozen=True, eq=False)
class DigitImages:
    """Pictures with the digit that each shows.

    Attributes:
        images_S1HW: Pixels from 0 to 1.
        labels_S: int64, 0 to 9.
    """

    images_S1HW: Tensor
    labels_S: Tensor

    def __len__(self) -> int:
        """S."""
        return len(self.labels_S)

    def __getitem__(self, chosen: Tensor | slice) -> DigitImages:
        """Some of the pictures."""
        return DigitImages(self.images_S1HW[chosen], self.labels_S[chosen])


@dataclass(frozen=True, eq=False)
class DigitSource:
    """Pictures for training and testing.

    Attributes:
        name: For the report.
        train: Training pictures.
        test: Test pictures.
    """

    name: str
    train: DigitImages
    test: DigitImages


def uci_digits(num_train: int, *, seed: int) -> DigitSource:
    """Divide UCI's 1,797 digits at random.

    The file is ordered by writer; both parts get all writers.
    """
    images, labels = load_digits()
    images_SHW = torch.tensor(images, dtype=torch.float32) / 16
    digits = DigitImages(images_SHW.unsqueeze(1), torch.tensor(labels))
    generator = torch.Generator().manual_seed(seed)
    order_S = torch.randperm(len(digits), generator=generator)
    return DigitSource(
        "UCI digits, 8x8",
        digits[order_S[:num_train]],
        digits[order_S[num_train:]],
    )
