"""The handwritten digits that come with scikit-learn, parted at random.

Axes: S pictures, D pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor

__all__ = ["DIGIT_SIDE", "DigitImages", "split_digits"]

DIGIT_SIDE = 8  # pixels, height and width


@dataclass(frozen=True, eq=False)
class DigitImages:
    """Pictures with the digit that each shows.

    Attributes:
        images_SD: Pixels from 0 to 1, row by row.
        labels_S: int64, 0 to 9.
    """

    images_SD: Tensor
    labels_S: Tensor


def split_digits(num_train: int, *, seed: int) -> tuple[DigitImages, DigitImages]:
    """Parts the 1797 digits in those to learn from and those to be tested on.

    Args:
        num_train: Pictures of the first part; the others are the second.
        seed: Of the order. The digits come by writer; both parts get all writers.
    """
    source = load_digits()
    images_SD = torch.tensor(source.data, dtype=torch.float32) / 16
    labels_S = torch.tensor(source.target, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    order_S = torch.randperm(len(labels_S), generator=generator)
    first_S, second_S = order_S[:num_train], order_S[num_train:]
    return (
        DigitImages(images_SD[first_S], labels_S[first_S]),
        DigitImages(images_SD[second_S], labels_S[second_S]),
    )
