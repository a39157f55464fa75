"""Write one dataset of the mixture: JPEG images and one COCO json per split."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from damex.datasets.minimix.canvas import Box, Canvas
from damex.datasets.minimix.report import DatasetReport
from damex.datasets.minimix.spec import SPLITS, DatasetSpec, Renderer

VERSION = "1.2"

_LICENSE = "Apache-2.0; digits: CC BY 4.0; photographs: CC BY 2.0 (see data/README.md)"
# Most images are square; the others make a batch need padding.
_SIZES_HW = ((128, 128), (128, 128), (128, 128), (96, 128), (128, 96))
_JPEG_QUALITY = 60


def write_dataset(root: Path, spec: DatasetSpec, *, seed: int) -> DatasetReport:
    """Render a dataset into a new folder of its name.

    Args:
        root: Existing folder that gets the dataset's folder.
        spec: What to render.
        seed: Seed of the mixture.

    Returns:
        The counts of the dataset.
    """
    (root / spec.name / "images").mkdir(parents=True)
    num_boxes = {split: _write_split(root, spec, split, seed) for split in SPLITS}
    num_images = {split: spec.num_images(split) for split in SPLITS}
    return DatasetReport(spec.name, num_images, num_boxes, spec.classes)


def file_names(spec: DatasetSpec) -> list[str]:
    """Return the paths of all files of a dataset, relative to the mixture's root."""
    names = [f"{spec.name}/{split}.json" for split in SPLITS]
    for split in SPLITS:
        images = range(spec.num_images(split))
        names += [f"{spec.name}/images/{image_name(split, i)}" for i in images]
    return names


def image_name(split: str, index: int) -> str:
    """Return the file name of an image of a split."""
    return f"{split}_{index:05d}.jpg"


def render_image(
    spec: DatasetSpec, split: str, index: int, *, seed: int, renderer: Renderer
) -> Canvas:
    """Render one image from its own random generator.

    The generator depends on (seed, dataset, split, index) only, so an image does
    not change with the number or the order of the others.

    Args:
        spec: The dataset.
        split: 'train' or 'val'.
        index: Number of the image in its split, from 0.
        seed: Seed of the mixture.
        renderer: What `spec.build_renderer(split)` returned.

    Returns:
        The canvas; it holds one object at least.
    """
    key = [seed, zlib.crc32(spec.name.encode()), SPLITS.index(split), index]
    rng = np.random.default_rng(key)
    size_hw = _SIZES_HW[rng.integers(len(_SIZES_HW))]
    return renderer(size_hw, rng)


def _write_split(root: Path, spec: DatasetSpec, split: str, seed: int) -> int:
    folder = root / spec.name
    renderer = spec.build_renderer(split)
    category_ids = {name: i for i, name in enumerate(spec.classes, start=1)}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(spec.num_images(split)):
        canvas = render_image(spec, split, index, seed=seed, renderer=renderer)
        picture, name = canvas.image(), image_name(split, index)
        picture.save(folder / "images" / name, quality=_JPEG_QUALITY, optimize=True)
        image = {"id": index + 1, "file_name": name}
        images.append(image | {"width": picture.width, "height": picture.height})
        for box in canvas.boxes():
            annotation_id = len(annotations) + 1
            category_id = category_ids[box.name]
            annotations.append(_annotation(annotation_id, index + 1, category_id, box))
    content = {
        "info": {
            "description": f"damex minimix: {spec.name}, {split}",
            "version": VERSION,
            "seed": seed,
            "license": _LICENSE,
        },
        "images": images,
        "annotations": annotations,
        "categories": [{"id": i, "name": name} for name, i in category_ids.items()],
    }
    text = json.dumps(content, separators=(",", ":"))
    (folder / f"{split}.json").write_text(text + "\n", encoding="utf-8")
    return len(annotations)


def _annotation(
    annotation_id: int, image_id: int, category_id: int, box: Box
) -> dict[str, Any]:
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": category_id,
        "bbox": [box.x, box.y, box.width, box.height],
        "area": box.width * box.height,
        "iscrowd": 0,
    }
