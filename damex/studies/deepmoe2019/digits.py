"""Small images to tell apart: the digits that come with scikit-learn.

Axes: B images, H and W their height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor

__all__ = ["NUM_CLASSES", "SIZE", "Digits", "draw_digits"]

NUM_CLASSES = 10
SIZE = 8  # pixels, height and width
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
    source = load_digits()
    images_B1HW = torch.tensor(source.images, dtype=torch.float32)[:, None] / 16.0
    labels_B = torch.tensor(source.target)
    generator = torch.Generator().manual_seed(seed)
    order_B = torch.randperm(len(labels_B), generator=generator)
    train_B, test_B = order_B[:num_train], order_B[NUM_TRAIN:]
    return Digits(
        images_B1HW[train_B], labels_B[train_B], images_B1HW[test_B], labels_B[test_B]
    )
