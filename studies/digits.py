"""The handwritten digits that come with scikit-learn, parted at random.

Axes: S pictures, D pixels.

Where pictures of digits come from: scikit-learn, or MNIST where its files lie.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor

__all__ = [
    "DIGIT_SIDE",
    "DigitImages",
    "DigitSource",
    "mnist_digits",
    "sklearn_digits",
    "split_digits",
]

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


NUM_TRAIN = 1100  # of scikit-learn's 1797 digits; no test picture is seen in training
IDX_IMAGES, IDX_LABELS = 2051, 2049
MNIST_FILES = (
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


@dataclass(frozen=True)
class DigitSource:
    """Where pictures come from.

    Attributes:
        name: For the report.
        train: Pictures for training samples.
        test: Others, for test samples.
    """

    name: str
    train: DigitImages
    test: DigitImages


def sklearn_digits() -> DigitSource:
    """The 8x8 digits that come with scikit-learn, as a stand-in for MNIST."""
    return DigitSource("scikit-learn digits, 8x8", *split_digits(NUM_TRAIN, seed=0))


def mnist_digits(folder: Path) -> DigitSource:
    """MNIST from its four idx files, gzipped or not.

    Args:
        folder: Where `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the two
            `t10k-` files lie, each with or without `.gz`.

    Raises:
        ValueError: If a file is missing or none of that kind.
    """
    splits = (
        DigitImages(
            _read_idx(folder, images, IDX_IMAGES, sides=2).flatten(1).float() / 255,
            _read_idx(folder, labels, IDX_LABELS, sides=0).long(),
        )
        for images, labels in MNIST_FILES
    )
    return DigitSource("MNIST, 28x28", *splits)


def _read_idx(folder: Path, name: str, magic: int, *, sides: int) -> Tensor:
    """One idx file: magic number, count, sides of a picture, then bytes."""
    paths = [folder / name, folder / f"{name}.gz"]
    found = [path for path in paths if path.is_file()]
    if not found:
        raise ValueError(
            f"MNIST: {paths[0]} is missing, also with .gz; put the four idx files "
            "there, or rename the folder to run on scikit-learn's digits"
        )
    content = found[0].read_bytes()
    if found[0].suffix == ".gz":
        content = gzip.decompress(content)
    start = 4 * (2 + sides)
    header = [int.from_bytes(content[i : i + 4], "big") for i in range(0, start, 4)]
    size = 1
    for side in header[1:]:
        size *= side
    if header[0] != magic or len(content) != start + size:
        raise ValueError(
            f"MNIST: {found[0]} is no idx file of kind {magic}: header {header}, "
            f"{len(content)} bytes, expected {start + size}; fetch it again"
        )
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start)
    return values.view(*header[1:])
