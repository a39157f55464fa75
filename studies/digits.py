"""Pictures of handwritten digits: UCI's, or MNIST if its files are there.

Axes: S pictures, H and W their height and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import mnist

from damex.errors import DataError
from damex.toydata.domains import load_digits

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
    """Where pictures come from.

    Attributes:
        name: For the report.
        train: Pictures to learn from.
        test: Others, to be tested on.
    """

    name: str
    train: DigitImages
    test: DigitImages


def uci_digits(num_train: int, *, seed: int) -> DigitSource:
    """Divide UCI's 1,797 digits at random.

    Args:
        num_train: Pictures to learn from; the others are for tests.
        seed: Of the order. The digits come by writer; both parts get all writers.
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


def mnist_digits(folder: Path) -> DigitSource:
    """MNIST from its four idx files, unpacked.

    Args:
        folder: Where `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the two
            `t10k-` files lie.

    Raises:
        DataError: If a file is missing or cannot be read.
    """
    train, test = (
        DigitImages(
            _read(folder / f"{part}-images-idx3-ubyte").unsqueeze(1).float() / 255,
            _read(folder / f"{part}-labels-idx1-ubyte").long(),
        )
        for part in ("train", "t10k")
    )
    return DigitSource("MNIST, 28x28", train, test)


def _read(path: Path) -> Tensor:
    try:
        return mnist.read_sn3_pascalvincent_tensor(str(path))
    except (OSError, AssertionError, KeyError, ValueError) as error:
        raise DataError(
            f"MNIST: {path} is missing or no idx file ({error}); put the four unpacked "
            "files there, or rename the folder to run on UCI's digits."
        ) from error
