"""What one dataset of the mixture is: a name, sizes, classes and a renderer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from damex.datasets.minimix.canvas import Canvas

SPLITS = ("train", "val")

Renderer = Callable[[tuple[int, int], np.random.Generator], Canvas]


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset of the mixture.

    Attributes:
        name: Folder name.
        classes: Class names in the order of their category ids, which start at 1.
        num_train: Number of training images.
        num_val: Number of validation images.
        build_renderer: Takes a split and returns the function that draws an image
            from (height, width) and a random generator.
    """

    name: str
    classes: tuple[str, ...]
    num_train: int
    num_val: int
    build_renderer: Callable[[str], Renderer]

    def num_images(self, split: str) -> int:
        """Return the number of images of a split, 'train' or 'val'."""
        return self.num_train if split == "train" else self.num_val
