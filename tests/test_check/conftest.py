"""A small dataset without any fault, which a test changes in one place."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from damex.workbench.check.check import check_config

CLASSES = ("car", "tree", "person")
SIZE = (96, 64)


@dataclass
class Dataset:
    """Documents of a dataset by split, and its folder; images lie there already."""

    root: Path
    train: dict
    val: dict
    text: dict

    def image(self, number: int) -> Path:
        return self.root / "images" / f"{number}.jpg"

    def save_image(self, number: int, picture: Image.Image, **options) -> None:
        picture.save(self.image(number), quality=92, **options)

    def write(self) -> None:
        for split in ("train", "val"):
            text = self.text.get(split) or json.dumps(getattr(self, split))
            (self.root / f"{split}.json").write_text(text, encoding="utf-8")

    def config(self, **entry) -> dict:
        named = dict(name=self.root.name, data_root=f"{self.root}/", img="images/")
        return dict(
            mixture=[{**named, "train": "train.json", "val": "val.json", **entry}]
        )

    def check(self, *, quick=False, entry=None, **config):
        self.write()
        cfg = {**self.config(**(entry or {})), **config}
        return check_config(cfg, quick=quick).findings


def picture(number: int, size=SIZE) -> Image.Image:
    """Blots of colour that no other number has."""
    rng = np.random.default_rng(number)
    blots = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(blots).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def clean_folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("clean") / "street"
    (root / "images").mkdir(parents=True)
    for number in range(1, 21):
        picture(number).save(root / "images" / f"{number}.jpg", quality=92)
    return root


@pytest.fixture
def dataset(clean_folder, tmp_path) -> Dataset:
    """14 training and 6 validation images; each class has a box in each image."""
    root = tmp_path / "street"
    (root / "images").mkdir(parents=True)
    for file in (clean_folder / "images").iterdir():
        (root / "images" / file.name).write_bytes(file.read_bytes())
    train, val = document(range(1, 15)), document(range(15, 21))
    return Dataset(root, copy.deepcopy(train), copy.deepcopy(val), {})


def document(numbers) -> dict:
    images, annotations = [], []
    for number in numbers:
        name = f"{number}.jpg"
        images.append(dict(id=number, file_name=name, width=SIZE[0], height=SIZE[1]))
        for index in range(len(CLASSES)):
            width, height = 12 + number % 5, 10 + index
            annotations.append(
                dict(
                    id=3 * number + index,
                    image_id=number,
                    category_id=index + 1,
                    bbox=[30 * index + number % 4, 3 * number % 40, width, height],
                    area=width * height,
                    iscrowd=0,
                )
            )
    categories = [dict(id=i, name=name) for i, name in enumerate(CLASSES, start=1)]
    return dict(images=images, annotations=annotations, categories=categories)
