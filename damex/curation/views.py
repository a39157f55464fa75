"""Contents of a split for the overview page: counts, sizes, and sample images."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from damex.curation.sources import Source
from damex.datasets.coco_checks import Boxes, read_boxes
from damex.datasets.coco_records import Expectations, Records, parse_records

# COCO's limits of small, medium and large: the side of a square in pixels.
SMALL, LARGE = 32, 96


class Sample(NamedTuple):
    """A shown image; ``boxes`` are class name and left, top, width, height, in px."""

    path: Path
    name: str
    boxes: list[tuple[str, tuple[float, float, float, float]]]
    applies_exif: bool


@dataclass(frozen=True)
class SplitView:
    """Numbers and samples of one split: B boxes, M images.

    Args:
        file: Its annotation file.
        counts: Class name in the mixture -> number of boxes.
        side_B: Side of the square with the area of each box, in pixels.
        size_M2: Width and height of the images.
    """

    dataset: str
    split: str
    file: str
    counts: Mapping[str, int]
    side_B: np.ndarray
    size_M2: np.ndarray
    samples: Sequence[Sample]

    @property
    def title(self) -> str:
        """Dataset and split."""
        return f"{self.dataset}, {self.split}"

    def shares(self) -> tuple[float, float, float]:
        """Shares of small, medium and large boxes; zeros without any box."""
        count = max(len(self.side_B), 1)
        small = float((self.side_B < SMALL).sum()) / count
        large = float((self.side_B >= LARGE).sum()) / count
        return small, (1 - small - large if len(self.side_B) else 0.0), large


def view_of(
    source: Source,
    expected: Expectations,
    rename: Mapping[str, str],
    *,
    num_samples: int,
    seed: int,
) -> SplitView | None:
    """View of a source with ``num_samples`` random images; None if unreadable."""
    document, _ = source.read()
    records, _ = parse_records(document, source.place, expected.classes)
    if records is None:
        return None
    boxes, _ = read_boxes(records, expected)
    name_of = {
        key: rename.get(name, name)
        for key, name in records.categories.items()
        if name and expected.uses(name)
    }
    names = [
        name_of.get(records.annotations[position]["category_id"], "")
        for position in boxes.position_B.tolist()
    ]
    counts = Counter(names)
    area_B = np.clip(boxes.box_B4[:, 2], 0, None) * np.clip(boxes.box_B4[:, 3], 0, None)
    chosen = _choose(records, boxes, names, num_samples, random.Random(seed))
    return SplitView(
        dataset=source.place.dataset,
        split=source.place.split,
        file=source.place.file,
        counts={name: counts[name] for name in dict.fromkeys(name_of.values())},
        side_B=np.sqrt(area_B[np.isfinite(area_B)]),
        size_M2=records.size_M2[np.isfinite(records.size_M2).all(axis=1)],
        samples=_samples(records, boxes, names, chosen, source.images, expected),
    )


def _choose(
    records: Records, boxes: Boxes, names: Sequence[str], num: int, rng: random.Random
) -> list[int]:
    """Positions of images: one for each class, the rarest first, then any others."""
    images = records.image_N[boxes.position_B].tolist()
    of_class: dict[str, list[int]] = {}
    for name, image in zip(names, images, strict=True):
        if image >= 0:
            of_class.setdefault(name, []).append(image)
    chosen: dict[int, None] = {}
    shown: set[str] = set()
    classes_of: dict[int, set[str]] = {}
    for name, image in zip(names, images, strict=True):
        classes_of.setdefault(image, set()).add(name)
    for name in sorted(of_class, key=lambda name: len(of_class[name])):
        if name not in shown and len(chosen) < num:
            image = rng.choice(of_class[name])
            chosen[image] = None
            shown |= classes_of[image]
    others = [i for i in range(len(records.images)) if i not in chosen]
    rest = min(max(num - len(chosen), 0), len(others))
    chosen |= dict.fromkeys(rng.sample(others, rest))
    return [*chosen]


def _samples(
    records: Records,
    boxes: Boxes,
    names: Sequence[str],
    chosen: Sequence[int],
    folder: Path,
    expected: Expectations,
) -> list[Sample]:
    found: dict[int, list[Any]] = {image: [] for image in chosen}
    images = records.image_N[boxes.position_B].tolist()
    for row, image in enumerate(images):
        if image in found and np.isfinite(boxes.box_B4[row]).all():
            x, y, w, h = boxes.box_B4[row].tolist()
            found[image].append((names[row] or "?", (x, y, w, h)))
    samples = []
    for image, own in found.items():
        name = str(records.images[image].get("file_name"))
        samples.append(Sample(folder / name, name, own, expected.applies_exif))
    return samples
