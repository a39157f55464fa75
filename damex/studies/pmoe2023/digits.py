"""Where pictures of digits come from: scikit-learn, or MNIST where its files lie."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from damex.studies.digits import DigitImages, split_digits

__all__ = ["DigitSource", "mnist_digits", "sklearn_digits"]

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
