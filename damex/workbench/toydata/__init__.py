"""The toy mixture: five small detection datasets, generated in seconds.

For trying and testing training on several datasets at once: no download, about 6 MB,
128 px, and a tiny DETR learns a part of it in minutes on a CPU.

    damex toydata --out data/toy

| dataset  | train/val | appearance                               | classes           |
|----------|-----------|------------------------------------------|-------------------|
| shapes   | 900/60    | flat shapes on noisy pastel fades        | star, square, ... |
| digits   | 500/60    | handwritten digits (real) on ruled paper | zero ... nine     |
| photos   | 250/60    | stickers on printed photographs (real)   | leaf, circle, ... |
| playroom | 120/60    | toys on a wooden floor                   | ball, crate, ...  |
| arcade   | 60/60     | a dark screen with a grid                | coin, chip, ...   |

Like real mixtures, datasets differ in looks and size, names overlap under different
ids, and `playroom` and `arcade` draw three objects alike and name them differently.
data/README.md explains the choices. Difficulty was set by short trainings of the quick
start; no choice compared methods.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from damex.errors import ConfigError
from damex.files import atomic_folder, check_free
from damex.workbench.toydata.domains import DATASETS, SPLITS, DatasetSpec, Renderer
from damex.workbench.toydata.drawing import Canvas

VERSION = "1.3"

_LICENSE = "Apache-2.0; digits: CC BY 4.0; photographs: CC BY 2.0 (see data/README.md)"
# Mostly square; the others make batches need padding.
_SIZES_HW = ((128, 128), (128, 128), (128, 128), (96, 128), (128, 96))


def toydata(*, out: Path, seed: int) -> None:
    """``damex toydata``: generate the mixture in a new folder, and print its sizes."""
    if holds_toy_mixture(out, seed=seed):
        print(f"{out} holds the toy mixture already; to make it again, delete {out}.")
        return
    boxes = generate_toy_mixture(out, seed=seed)
    print(f"{out}\n{'dataset':<10}{'images train/val':>18}{'boxes':>14}  classes")
    for spec in DATASETS:
        images, found = (
            f"{train}/{val}"
            for train, val in ((spec.num_train, spec.num_val), boxes[spec.name])
        )
        print(f"{spec.name:<10}{images:>18}{found:>14}  {', '.join(spec.classes)}")


def generate_toy_mixture(
    out: Path, *, seed: int = 0, specs: Sequence[DatasetSpec] = DATASETS
) -> dict[str, list[int]]:
    """Generate the toy mixture in a new or empty folder.

    Equal arguments give equal files (with the same Pillow and NumPy). The folder
    appears when it is complete. ConfigError if the seed is negative, or `out` is taken
    or cannot be written.

    Returns:
        For each dataset the number of boxes in its two splits.
    """
    if seed < 0:
        raise ConfigError(f"toy mixture: seed must be 0 or more, got {seed}")
    check_free(out)
    boxes = {}
    with atomic_folder(out) as made:
        for spec in specs:
            (made / spec.name / "images").mkdir(parents=True)
            boxes[spec.name] = [
                _write_split(made, spec, split, seed) for split in SPLITS
            ]
    return boxes


def holds_toy_mixture(out: Path, *, seed: int = 0) -> bool:
    """Return whether a folder has all datasets of this version and seed."""
    try:
        return all(
            json.loads((out / spec.name / f"{split}.json").read_text("utf-8"))["info"]
            == _info(spec, split, seed)
            for spec in DATASETS
            for split in SPLITS
        )
    except (OSError, ValueError, TypeError, KeyError):
        return False


def render_image(
    spec: DatasetSpec, split: str, index: int, *, seed: int, renderer: Renderer
) -> Canvas:
    """Render an image with at least one object by a result of `spec.build_renderer`.

    The random generator depends on (seed, dataset, split, index) only, so an image does
    not change with the number or the order of the others.
    """
    key = [seed, zlib.crc32(spec.name.encode()), SPLITS.index(split), index]
    rng = np.random.default_rng(key)
    size_hw = _SIZES_HW[rng.integers(len(_SIZES_HW))]
    return renderer(size_hw, rng)


def _write_split(root: Path, spec: DatasetSpec, split: str, seed: int) -> int:
    """Write the images and the COCO json of a split; return the number of boxes."""
    folder = root / spec.name
    renderer = spec.build_renderer(split)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(spec.num_train if split == "train" else spec.num_val):
        canvas = render_image(spec, split, index, seed=seed, renderer=renderer)
        picture, name = canvas.image(), f"{split}_{index:05d}.jpg"
        picture.save(folder / "images" / name, quality=60, optimize=True)
        size = {"width": picture.width, "height": picture.height}
        images.append({"id": index + 1, "file_name": name, **size})
        annotations += [
            {
                "id": number,
                "image_id": index + 1,
                "category_id": spec.classes.index(box.name) + 1,
                "bbox": box[1:],
                "area": box.width * box.height,
                "iscrowd": 0,
            }
            for number, box in enumerate(canvas.boxes(), len(annotations) + 1)
        ]
    names = enumerate(spec.classes, start=1)
    content = {
        "info": _info(spec, split, seed),
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in names],
    }
    text = json.dumps(content, separators=(",", ":")) + "\n"
    (folder / f"{split}.json").write_text(text, encoding="utf-8")
    return len(annotations)


def _info(spec: DatasetSpec, split: str, seed: int) -> dict[str, Any]:
    return {
        "description": f"damex toy mixture: {spec.name}, {split}",
        "version": VERSION,
        "seed": seed,
        "license": _LICENSE,
    }
