"""Fixtures for all tests: small real datasets on disk."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mmengine.registry import init_default_scope
from PIL import Image

import damex.registration


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """Registries as a config sets them up.

    The import above fills mmdet's registries (and makes mmdet importable where mmcv has
    no compiled ops); the scope lets mmengine's ``Compose`` find mmdet's transforms.
    """
    assert damex.registration.__all__
    init_default_scope("mmdet")
    # Every mmengine dataset calls gc.collect(); without a freeze, each call looks
    # through all of torch and takes 0.2 s.
    gc.freeze()


@pytest.fixture(scope="session")
def make_coco_dataset() -> Callable[..., dict[str, Any]]:
    """Factory of COCO datasets; see :func:`_write_coco_dataset`."""
    return _write_coco_dataset


@pytest.fixture
def edit_json() -> Callable[[str | Path, Callable[[dict], Any]], None]:
    """``edit_json(path, change)``: load a JSON file, ``change(document)``, write it."""

    def edit(path: str | Path, change: Callable[[dict], Any]) -> None:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        change(document)
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    return edit


@pytest.fixture
def two_datasets(tmp_path: Path) -> list[dict[str, Any]]:
    """Entries of a ``mixture`` whose two datasets collide wherever they can.

    ``street`` has the classes car, person, bus (in this order) and 5 images; ``park``
    has person, dog, car and 3 images. Image, annotation and category ids and the file
    names of the images are the same in both. ``val.json`` equals ``train.json``.
    """
    return [
        _write_coco_dataset(
            tmp_path / "street", classes=["car", "person", "bus"], num_images=5, seed=1
        ),
        _write_coco_dataset(
            tmp_path / "park", classes=["person", "dog", "car"], num_images=3, seed=2
        ),
    ]


def _write_coco_dataset(
    root: Path,
    *,
    classes: list[str],
    num_images: int,
    boxes_per_image: int = 2,
    size: tuple[int, int] = (48, 32),
    seed: int = 0,
) -> dict[str, Any]:
    """Write ``images/0.png`` ..., ``train.json`` and an equal ``val.json``.

    Box ``b`` of image ``i`` has class number ``(i + b) % len(classes)``. Category ids
    are 1, 2, ... in the order of ``classes``; image ids and annotation ids start at 1.

    Args:
        root: Folder to make; its name is the dataset's name.
        classes: Names of the categories, in file order.
        num_images: Number of images, filled with noise.
        boxes_per_image: Boxes with random whole-number corners inside of the image.
        size: Width and height of the images in pixels.
        seed: Of pixels and boxes.

    Returns:
        The dataset's entry for ``mixture``.
    """
    rng = np.random.default_rng(seed)
    width, height = size
    (root / "images").mkdir(parents=True)
    images, annotations = [], []
    for i in range(num_images):
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{i}.png")
        images.append(dict(id=i + 1, file_name=f"{i}.png", width=width, height=height))
        for b in range(boxes_per_image):
            w, h = (int(rng.integers(side // 4, side // 2)) for side in size)
            x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=i + 1,
                    category_id=(i + b) % len(classes) + 1,
                    bbox=[x, y, w, h],
                    area=w * h,
                    iscrowd=0,
                )
            )
    categories = [dict(id=i, name=name) for i, name in enumerate(classes, start=1)]
    document = dict(images=images, annotations=annotations, categories=categories)
    for split in ("train", "val"):
        (root / f"{split}.json").write_text(json.dumps(document), encoding="utf-8")
    return dict(
        name=root.name,
        data_root=f"{root}/",
        train="train.json",
        val="val.json",
        img="images/",
    )
