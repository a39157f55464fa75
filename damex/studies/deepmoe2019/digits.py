"""Small images to tell apart, one channel each, and their batches.

Axes: B images, H and W their height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from damex.studies.digits import DIGIT_SIDE, split_digits

__all__ = ["NUM_CLASSES", "Digits", "draw_digits"]

NUM_CLASSES = 10
NUM_TRAIN = 1200  # of 1797; the other 597 are the test images


@dataclass(frozen=True, eq=False)
class Digits:
    """Images in [0, 1] with one channel, (B, 1, 8, 8), and their classes.

    Attributes:
        train_images_B1HW: To learn from.
        train_labels_B: int64.
        test_images_B1HW: To be tested on.
        test_labels_B: int64.
    """

    train_images_B1HW: Tensor
    train_labels_B: Tensor
    test_images_B1HW: Tensor
    test_labels_B: Tensor

    def batches(
        self, size: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of training images in a new order; an incomplete batch is left out.

        Args:
            size: Images per batch.
            generator: Of the order.
        """
        order_B = torch.randperm(len(self.train_labels_B), generator=generator)
        for index_B in order_B.split(size):
            if len(index_B) == size:
                yield self.train_images_B1HW[index_B], self.train_labels_B[index_B]


def draw_digits(*, seed: int, num_train: int = NUM_TRAIN) -> Digits:
    """Parts the images in two at random.

    Args:
        seed: Of the parting; the test images are the same for any `num_train`.
        num_train: Training images, 1200 at most.
    """
    train, test = split_digits(NUM_TRAIN, seed=seed)
    shape_1HW = (1, DIGIT_SIDE, DIGIT_SIDE)
    return Digits(
        train.images_SD[:num_train].unflatten(1, shape_1HW),
        train.labels_S[:num_train],
        test.images_SD.unflatten(1, shape_1HW),
        test.labels_S,
    )
