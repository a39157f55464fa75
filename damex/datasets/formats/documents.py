"""Convert samples to COCO documents: boxes in pixels of the image as training loads it.

Boxes are checked against the image. Invalid ones are left out and counted; those that
cross the border stay (training clips them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from damex.datasets.formats.images import (
    Header,
    for_all,
    images_of_any_size,
    read_header,
    turn_box,
)
from damex.datasets.formats.records import (
    Box,
    Corners,
    Sample,
    SplitSummary,
    Summary,
)
from damex.datasets.image_checks import SIZE_TOLERANCE, same_size

_DIGITS = 6  # decimals of a pixel


def coco_document(
    root: Path, split: str, samples: Sequence[Sample], summary: Summary
) -> dict[str, Any]:
    """The COCO document of a split; samples of the same file are joined.

    Ids of images, annotations and categories (the classes of ``summary``) are 1, 2, ...
    ``source`` and ``place`` give the origin of a record. Sizes and drops are counted in
    ``summary``.
    """
    with images_of_any_size():
        headers = for_all(read_header, root, (sample.image for sample in samples))
    ids = {name: number for number, name in enumerate(summary.classes, start=1)}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    counts, filled = dict.fromkeys(summary.classes, 0), 0
    for sample in _joined(samples, summary):
        header, lost = headers[sample.image], len(sample.boxes)
        if isinstance(header, OSError):
            summary.drop("images that cannot be read", sample.image)
            summary.drop("boxes of images that cannot be read", sample.image, lost)
            continue
        if (boxes := _valid_boxes(sample, header, summary)) is None:
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
        filled += bool(boxes)
        for box in boxes:
            counts[box.label] += 1
            x1, y1, x2, y2 = box.corners
            sides = [round(value, _DIGITS) for value in (x1, y1, x2 - x1, y2 - y1)]
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=len(images),
                    category_id=ids[box.label],
                    bbox=sides,
                    area=sides[2] * sides[3] if box.area is None else box.area,
                    iscrowd=int(box.crowd),
                    place=box.place,
                )
            )
    summary.splits[split] = SplitSummary(len(images), len(images) - filled, counts)
    categories = [dict(id=number, name=name) for name, number in ids.items()]
    return dict(images=images, annotations=annotations, categories=categories)


def _joined(samples: Sequence[Sample], summary: Summary) -> list[Sample]:
    """Samples with those of one image merged."""
    found: dict[str, Sample] = {}
    for sample in samples:
        first = found.setdefault(sample.image, sample)
        if first is not sample:
            summary.note("images that two records annotate: joined", sample.source)
            found[sample.image] = replace(first, boxes=[*first.boxes, *sample.boxes])
    return list(found.values())


def _valid_boxes(sample: Sample, header: Header, summary: Summary) -> list[Box] | None:
    """Boxes in pixels as shown; None if the image is left out."""
    turned = _is_turned(sample, header, summary)
    if turned is None:
        width, height = sample.stated_size or (0, 0)
        where = (
            f"{sample.source}: {sample.image} is stated as {width} x {height} px, "
            f"the file has {header.shown[0]} x {header.shown[1]}"
        )
        summary.drop("images of another size than their annotation", where)
        summary.drop("boxes of images of another size", where, len(sample.boxes))
        return None
    width, height = header.shown if sample.normalised else (1, 1)
    valid: dict[tuple[str, Corners], Box] = {}
    for box in sample.boxes:
        x1, y1, x2, y2 = box.corners
        corners = (x1 * width, y1 * height, x2 * width, y2 * height)
        corners = turn_box(corners, header) if turned else corners
        fault = _fault(corners, header.shown)
        if fault is None and (box.label, corners) in valid:
            fault = "boxes that occur twice"
        if fault is None:
            valid[box.label, corners] = box._replace(corners=corners)
        else:
            colon = ":" if isinstance(box.place, int) else ": "
            summary.drop(fault, f"{sample.source}{colon}{box.place}")
    return list(valid.values())


def _is_turned(sample: Sample, header: Header, summary: Summary) -> bool | None:
    """Whether boxes fit the unrotated pixels; None if the stated size is wrong."""
    stated, shown, stored = sample.stated_size, header.shown, header.stored
    turned = False
    if sample.normalised:
        pass
    elif stated is not None:
        turned = not same_size(stated, shown)
        if turned and (header.orientation == 1 or not same_size(stated, stored)):
            return None
    elif header.orientation >= 5:
        # Without a size, boxes fit the image as shown unless only stored holds all.
        boxes = [box.corners for box in sample.boxes]
        turned = _hold(stored, boxes) and not _hold(shown, boxes)
    if turned:
        what = "images with EXIF rotation: boxes turned with them"
        summary.note(what, sample.image)
    elif header.orientation != 1 and sample.boxes:
        what = (
            "images with EXIF rotation: boxes taken for the image as it is shown, "
            "and not as it is stored"
        )
        summary.note(what, sample.image)
    return turned


def _fault(corners: Corners, size: tuple[int, int]) -> str | None:
    """Why a box is invalid; None if it is valid."""
    x1, y1, x2, y2 = corners
    if not all(map(math.isfinite, corners)):
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
