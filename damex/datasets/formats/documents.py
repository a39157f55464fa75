"""Convert samples to COCO documents: boxes in pixels of the image as training loads it.

Boxes are checked against the image. Invalid ones are left out and counted; those that
cross the border stay (training clips them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from damex.datasets.formats.images import (
    Header,
    for_all,
    images_of_any_size,
    read_header,
    turn_box,
)
from damex.datasets.formats.records import Box, Ledger, Sample
from damex.datasets.image_checks import SIZE_TOLERANCE, same_size

Corners = tuple[float, float, float, float]

_DIGITS = 6  # decimals of a pixel


class DocumentWriter:
    """Makes COCO documents with paths relative to ``root``.

    Category ids are 1, 2, ... in the order of ``classes``; ``ledger`` counts drops.
    """

    def __init__(self, root: Path, classes: Sequence[str], ledger: Ledger) -> None:
        self._root = root
        self._ids = {name: number for number, name in enumerate(classes, start=1)}
        self._ledger = ledger
        self._headers: dict[str, Header | OSError] = {}

    def write(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The COCO document of one split; samples of the same file are joined.

        Image and annotation ids are 1, 2, ...; ``source`` and ``place`` give the origin
        of a record.
        """
        new = [s.image for s in samples if s.image not in self._headers]
        with images_of_any_size():
            self._headers.update(for_all(read_header, self._root, new))
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for sample in _joined(samples, self._ledger):
            header = self._headers[sample.image]
            boxes = self._boxes(sample, header)
            if boxes is None or isinstance(header, OSError):
                continue
            width, height = header.shown
            images.append(
                dict(
                    id=len(images) + 1,
                    file_name=sample.image,
                    width=width,
                    height=height,
                    source=sample.source,
                )
            )
            for box in boxes:
                annotations.append(
                    dict(id=len(annotations) + 1, image_id=len(images), **box)
                )
        categories = [dict(id=number, name=name) for name, number in self._ids.items()]
        return dict(images=images, annotations=annotations, categories=categories)

    def _boxes(
        self, sample: Sample, header: Header | OSError
    ) -> list[dict[str, Any]] | None:
        """Annotation records of an image; None if the image is left out."""
        lost = len(sample.boxes)
        if isinstance(header, OSError):
            self._ledger.drop("images that cannot be read", sample.image)
            self._ledger.drop("boxes of images that cannot be read", sample.image, lost)
            return None
        turned = self._is_turned(sample, header)
        if turned is None:
            width, height = sample.stated_size or (0, 0)
            where = (
                f"{sample.source}: {sample.image} is stated as {width} x {height} px, "
                f"the file has {header.shown[0]} x {header.shown[1]}"
            )
            self._ledger.drop("images of another size than their annotation", where)
            self._ledger.drop("boxes of images of another size", where, lost)
            return None
        seen: set[tuple[str, Corners]] = set()
        records = []
        for box in sample.boxes:
            where = _where(sample, box)
            corners = _pixels(box, sample, header)
            if turned:
                corners = turn_box(corners, header)
            fault = _fault(corners, header.shown)
            if fault is None and (box.label, corners) in seen:
                fault = "boxes that stand there twice"
            if fault is not None:
                self._ledger.drop(fault, where)
                continue
            seen.add((box.label, corners))
            records.append(self._record(box, corners))
        return records

    def _record(self, box: Box, corners: Corners) -> dict[str, Any]:
        x1, y1, x2, y2 = corners
        sides = [round(value, _DIGITS) for value in (x1, y1, x2 - x1, y2 - y1)]
        area = sides[2] * sides[3] if box.area is None else box.area
        return dict(
            category_id=self._ids[box.label],
            bbox=sides,
            area=area,
            iscrowd=int(box.crowd),
            place=box.place,
        )

    def _is_turned(self, sample: Sample, header: Header) -> bool | None:
        """Whether boxes fit the unrotated pixels; None if the stated size is wrong."""
        stated, shown, stored = sample.stated_size, header.shown, header.stored
        if stated is not None and not sample.normalised:
            if not same_size(stated, shown):
                if header.orientation == 1 or not same_size(stated, stored):
                    return None
                self._note_turned(sample)
                return True
        # Without a size, boxes fit the image as shown unless only stored holds all.
        elif header.orientation >= 5 and not sample.normalised:
            boxes = [box.corners for box in sample.boxes]
            if not _hold(shown, boxes) and _hold(stored, boxes):
                self._note_turned(sample)
                return True
        if header.orientation != 1 and sample.boxes:
            what = (
                "images with EXIF rotation: boxes taken for the image as it is shown, "
                "and not as it is stored"
            )
            self._ledger.note(what, sample.image)
        return False

    def _note_turned(self, sample: Sample) -> None:
        what = "images with EXIF rotation: boxes turned with them"
        self._ledger.note(what, sample.image)


def _joined(samples: Sequence[Sample], ledger: Ledger) -> list[Sample]:
    """Samples with those of one image merged."""
    found: dict[str, Sample] = {}
    for sample in samples:
        first = found.get(sample.image)
        if first is None:
            found[sample.image] = sample
        elif first is not sample:
            ledger.note("images that two records annotate: joined", sample.source)
            boxes = [*first.boxes, *sample.boxes]
            found[sample.image] = Sample(
                first.image, first.source, boxes, first.stated_size, first.normalised
            )
    return list(found.values())


def _where(sample: Sample, box: Box) -> str:
    colon = ":" if isinstance(box.place, int) else ": "
    return f"{sample.source}{colon}{box.place}"


def _pixels(box: Box, sample: Sample, header: Header) -> Corners:
    if not sample.normalised:
        return box.corners
    width, height = header.shown
    x1, y1, x2, y2 = box.corners
    return x1 * width, y1 * height, x2 * width, y2 * height


def _fault(corners: Corners, size: tuple[int, int]) -> str | None:
    """Why a box is invalid; None if it is valid."""
    x1, y1, x2, y2 = corners
    if not all(math.isfinite(value) for value in corners):
        return "boxes with a coordinate that is NaN or infinite"
    if x2 < x1 or y2 < y1:
        return "boxes with a negative width or height"
    if x2 == x1 or y2 == y1:
        return "boxes with a width or height of 0"
    if x1 >= size[0] or y1 >= size[1] or x2 <= 0 or y2 <= 0:
        return "boxes outside of their image"
    return None


def _hold(size: tuple[int, int], boxes: Sequence[Corners]) -> bool:
    """Whether all boxes end within an image of this size."""
    right, bottom = (side + SIZE_TOLERANCE for side in size)
    return all(b[2] <= right and b[3] <= bottom for b in boxes)


def count_classes(document: Mapping[str, Any]) -> dict[str, int]:
    """Boxes per class of a COCO document, in the order of its categories."""
    names = {category["id"]: category["name"] for category in document["categories"]}
    counts = dict.fromkeys(names.values(), 0)
    for record in document["annotations"]:
        counts[names[record["category_id"]]] += 1
    return counts
