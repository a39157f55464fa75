"""Boxes of COCO documents, and findings about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from damex.datasets.coco_records import Expectations, Records
from damex.datasets.findings import Finding

# A box that crosses the border by more is reported as clipped.
BORDER = 1.0
# Below half a cell of the finest feature map of a DETR (stride 8).
TINY = 4.0
TINY_SHARE = 0.1
# Many suspect boxes mean another format; a few are single mistakes.
SUSPICIOUS_COUNT = 3
SUSPICIOUS_SHARE = 0.1

# Messages about the shape of a box; the first fault that applies is reported.
SHAPES = MappingProxyType(
    {
        "box-negative": "has a negative width or height; expected both above 0.",
        "box-outside": "lies outside of the image ({size}).",
        "box-zero-size": "has a side of 0: training leaves it out.",
        "box-thin": "has a side below 1 px: training leaves it out.",
        "box-partly-outside": (
            "reaches over the border of the image ({size}): training clips it."
        ),
    }
)
# Faults of boxes that on_bad_box='drop' leaves out.
DROPPED = ("box-negative", "box-outside")
_BOX = "the box [x, y, width, height] = {record[bbox]} "


@dataclass(frozen=True)
class Boxes:
    """Boxes (B) of used classes on listed images, in the order of their records.

    ``position_B`` is the annotation's, ``box_B4`` is x, y, width, height in pixels, and
    ``size_B2`` the image's width and height (NaN if unknown).
    """

    position_B: np.ndarray
    box_B4: np.ndarray
    size_B2: np.ndarray

    def keep(self, mask_B: np.ndarray) -> Boxes:
        """Select boxes by a mask."""
        return Boxes(self.position_B[mask_B], self.box_B4[mask_B], self.size_B2[mask_B])


def read_boxes(records: Records, expected: Expectations) -> tuple[Boxes, list[int]]:
    """Boxes of used classes on listed images, and positions of malformed ones."""
    used = {key for key, name in records.categories.items() if expected.uses(name)}
    positions, malformed = [], []
    for position in np.flatnonzero(records.image_N >= 0).tolist():
        record = records.annotations[position]
        if record["category_id"] in used:
            (positions if is_box(record.get("bbox")) else malformed).append(position)
    boxes = chain.from_iterable(records.annotations[i]["bbox"] for i in positions)
    box_B4 = np.fromiter(boxes, np.float64, 4 * len(positions)).reshape(-1, 4)
    position_B = np.array(positions, np.int64)
    size_B2 = records.size_M2[records.image_N[position_B]]
    return Boxes(position_B, box_B4, size_B2), malformed


def is_box(box: Any) -> bool:
    """Whether a JSON value is a list of four numbers."""
    return isinstance(box, list) and len(box) == 4 and all(map(is_number, box))


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number, including NaN and infinity."""
    return type(value) in (int, float)


def area_of(record: Mapping[str, Any]) -> float:
    """The area of an annotation, by default that of its box."""
    area = record.get("area")
    return area if is_number(area) else record["bbox"][2] * record["bbox"][3]


@np.errstate(all="ignore")  # sums of NaN and of infinity
def faults_of_shape(boxes: Boxes) -> dict[str, np.ndarray]:
    """Masks (B,) of boxes by their first fault in ``SHAPES``."""
    x, y, w, h = boxes.box_B4.T
    width, height = boxes.size_B2.T
    outside = (x >= width) | (y >= height)
    # A box without a side at the corner (0, 0) is thin and not outside.
    outside |= (x + np.maximum(w, 1) <= 0) | (y + np.maximum(h, 1) <= 0)
    over = np.maximum.reduce([-x, -y, x + w - width, y + h - height])
    masks = {
        "box-negative": (w < 0) | (h < 0),
        "box-outside": outside,
        "box-zero-size": (w == 0) | (h == 0),
        "box-thin": (w < 1) | (h < 1),
        "box-partly-outside": over > BORDER,
    }
    rest = np.ones(len(x), bool)
    for kind, mask in masks.items():
        masks[kind] = rest & mask
        rest &= ~mask
    return masks


def usable_boxes(records: Records, expected: Expectations) -> Boxes:
    """The boxes of an error-free file that training and evaluation use."""
    boxes, _ = read_boxes(records, expected)
    faults = faults_of_shape(boxes)
    return boxes.keep(~np.any([faults[kind] for kind in DROPPED], axis=0))


def check_boxes(records: Records, expected: Expectations) -> Iterator[Finding]:
    """Findings about boxes and areas; at most one about the shape of each box."""
    boxes, malformed = read_boxes(records, expected)
    text = "bbox must be [x, y, width, height] in pixels, got {box}."
    yield from records.each(
        "box-format",
        "annotations",
        malformed,
        text,
        box=lambda i: f"{records.annotations[i].get('bbox')!r:.120}",
    )
    is_finite_B = np.isfinite(boxes.box_B4).all(axis=1)
    text = "must have finite numbers. Correct the record, or remove it."
    yield from _each(records, "box-not-finite", boxes.keep(~is_finite_B), text)
    boxes = boxes.keep(is_finite_B)
    known = boxes.keep(np.isfinite(boxes.size_B2).all(axis=1))
    if _are_normalised(known):  # the cause instead of its consequences
        count = len(boxes.box_B4)
        text = (
            f"all {count} boxes lie within [0, 1]: they look like shares of the image; "
            "expected pixels. Multiply them by width and height of their images."
        )
        yield records.place.finding("box-normalised", None, text, count=count)
        return
    faults = faults_of_shape(boxes)
    corners = [*_check_corners(records, known)]
    yield from corners
    if corners:  # they explain boxes over the border
        faults["box-partly-outside"][:] = False
    yield from _check_shapes(records, boxes, faults, expected)
    if expected.scales:
        bad = [mask for kind, mask in faults.items() if kind != "box-partly-outside"]
        sound = boxes.keep(~np.any(bad, axis=0))
        yield from _check_tiny(records, sound, max(expected.scales, key=min))
    boxes = boxes.keep(~np.any([faults[kind] for kind in DROPPED], axis=0))
    rows = [records.annotations[position] for position in boxes.position_B.tolist()]
    yield from _check_areas(records, boxes, rows)
    yield from _check_use(records, boxes, rows, expected)
    yield from _check_duplicates(records, boxes, rows)


def _each(
    records: Records,
    kind: str,
    boxes: Boxes,
    text: str,
    level: str | None = None,
    **values: Any,
) -> Iterator[Finding]:
    positions = boxes.position_B
    return records.each(
        kind, "annotations", positions, f"{_BOX}{text}", level=level, **values
    )


def _are_normalised(boxes: Boxes) -> bool:
    first_B2, second_B2 = boxes.box_B4[:, :2], boxes.box_B4[:, 2:]
    return bool(
        len(boxes.box_B4)
        and (first_B2 >= 0).all()
        and (first_B2 + second_B2 <= 1.01).all()
        and (second_B2 > 0).all()
        and (boxes.size_B2 > 2).all()
    )


def _check_corners(records: Records, boxes: Boxes) -> Iterator[Finding]:
    """Boxes that look like [x1, y1, x2, y2], judged from all of them together."""
    count = len(boxes.box_B4)
    first_B2, second_B2 = boxes.box_B4[:, :2], boxes.box_B4[:, 2:]
    beyond_B = (first_B2 + second_B2 > boxes.size_B2 + BORDER).any(axis=1)
    fits_B2 = (second_B2 >= first_B2) & (second_B2 <= boxes.size_B2 + BORDER)
    beyond = int(beyond_B.sum())
    enough = max(SUSPICIOUS_COUNT, SUSPICIOUS_SHARE * count)
    if beyond >= enough and fits_B2.all() and (first_B2 >= 0).all():
        text = (
            f"{beyond} of {count} boxes reach over the border as [x, y, width, height],"
            " and none as [x1, y1, x2, y2]: they may be corners. If so, write "
            "[x1, y1, x2 - x1, y2 - y1]."
        )
        yield records.place.finding("box-xyxy", None, text, count=count)


def _check_shapes(
    records: Records,
    boxes: Boxes,
    faults: Mapping[str, np.ndarray],
    expected: Expectations,
) -> Iterator[Finding]:
    splits = ["test"] if records.place.split == "test" else ["train", "val"]
    drop = " ".join(f"{split}_dataloader.dataset.on_bad_box=drop" for split in splits)
    for kind, mask_B in faults.items():
        level, advice = None, "Correct the record, or remove it."
        if kind in DROPPED and expected.on_bad_box == "drop":
            level, advice = "warning", "on_bad_box='drop' leaves it out."
        elif kind in DROPPED:
            advice = (
                "Correct the record (is it [x1, y1, x2, y2], or for another image "
                f"size?), or leave such boxes out with --cfg-options {drop}."
            )
        text = f"{SHAPES[kind]} {advice}"
        yield from _each(records, kind, boxes.keep(mask_B), text, level)


def _check_tiny(
    records: Records, boxes: Boxes, scale: tuple[float, float]
) -> Iterator[Finding]:
    """One finding for each class with many boxes that become tiny after resizing."""
    # As in mmcv, each side has its own bound.
    factor_B = np.minimum(
        max(scale) / boxes.size_B2.max(axis=1), min(scale) / boxes.size_B2.min(axis=1)
    )
    side_B = np.sqrt(boxes.box_B4[:, 2] * boxes.box_B4[:, 3]) * factor_B
    category_of = [records.annotations[p]["category_id"] for p in boxes.position_B]
    names = np.array([records.categories[key] for key in category_of], object)
    for name in sorted({*names[side_B < TINY]} - {""}):
        small = np.flatnonzero((names == name) & (side_B < TINY))
        count, total = len(small), int((names == name).sum())
        if count < TINY_SHARE * total:
            continue
        first = records.annotation_name(int(boxes.position_B[small[0]]))
        text = (
            f"{count} of {total} boxes, such as that of {first}, are below {TINY:g} px "
            f"where images are scaled to {scale[0]:g} x {scale[1]:g}; a detector "
            "hardly sees them. Train at a larger size."
        )
        yield records.place.finding("box-tiny", f"class {name!r}", text, count=count)


def _check_areas(
    records: Records, boxes: Boxes, rows: list[dict[str, Any]]
) -> Iterator[Finding]:
    """Compare ``area`` with the box; that of a mask may be smaller."""
    missing = [i for i, row in enumerate(rows) if not is_number(row.get("area"))]
    if missing:
        first = records.annotation_name(int(boxes.position_B[missing[0]]))
        text = (
            f"{len(missing)} of {len(rows)} annotations have no 'area', such as "
            f"{first}; width times height is taken. Nothing to do without masks."
        )
        yield records.place.finding("area-missing", None, text, count=len(missing))
    area_B = np.array([area_of(row) for row in rows], np.float64)
    has_mask_B = np.array([bool(row.get("segmentation")) for row in rows], bool)
    w, h = boxes.box_B4[:, 2], boxes.box_B4[:, 3]
    has_size_B = (w >= 1) & (h >= 1)
    # Some tools count the pixels on both borders.
    large_B = area_B > (w + 2) * (h + 2)
    small_B = (area_B < np.maximum(w - 2, 0) * np.maximum(h - 2, 0)) & (area_B > 0)
    other = "area-inconsistent"
    for kind, mask_B, fault, level in (
        ("area-zero", area_B <= 0, "above 0: training leaves it out", None),
        (other, large_B, "at most width times height", None),
        (other, small_B & ~has_mask_B, "width times height without a mask", "info"),
    ):
        found = boxes.keep(mask_B & has_size_B)
        text = f"has the area {{record[area]:g}}, expected {fault}. Correct it."
        yield from _each(records, kind, found, text, level)


def _check_use(
    records: Records,
    boxes: Boxes,
    rows: list[dict[str, Any]],
    expected: Expectations,
) -> Iterator[Finding]:
    """Findings on boxes that training does not use, and files with only such boxes."""
    ignored_B = np.array([bool(row.get("ignore")) for row in rows], bool)
    text = "is marked 'ignore': training leaves it out."
    yield from _each(records, "box-ignored", boxes.keep(ignored_B), text)
    if records.place.split != "train" or not expected.filter_empty:
        return
    sides_B = np.min(boxes.box_B4[:, 2:], axis=1) >= 1
    trains = (
        not row.get("iscrowd") and not row.get("ignore") and not area_of(row) <= 0
        for row, has_sides in zip(rows, sides_B, strict=True)
        if has_sides
    )
    if not any(trains) and records.images:
        crowds = sum(bool(row.get("iscrowd")) for row in rows)
        names = [*(expected.classes or records.categories.values())]
        shown = f"{names[:10]}{' and others' * (len(names) > 10)}"
        text = (
            f"there is nothing to train on: of {len(rows)} boxes of {shown}, {crowds} "
            f"are crowds (iscrowd) and {int((~sides_B).sum())} have a side below 1 px. "
            "Correct the file, or 'classes' in the mixture entry."
        )
        yield records.place.finding("nothing-to-train", None, text, level="error")


def _check_duplicates(
    records: Records, boxes: Boxes, rows: list[dict[str, Any]]
) -> Iterator[Finding]:
    """Boxes that occur twice in an image, with the same class."""
    number = {key: i for i, key in enumerate(records.categories)}
    category_B = np.array([number[row["category_id"]] for row in rows], np.int64)
    image_B = records.image_N[boxes.position_B]
    key_B6 = np.column_stack([image_B, category_B, boxes.box_B4])
    order_B = np.lexsort(key_B6.T)
    key_B6, position_B = key_B6[order_B], boxes.position_B[order_B]
    equal = (key_B6[1:] == key_B6[:-1]).all(axis=1)
    pairs = zip(position_B[1:][equal], position_B[:-1][equal], strict=True)
    first_of = {int(second): int(first) for second, first in pairs}
    yield from records.each(
        "duplicate-box",
        "annotations",
        sorted(first_of),
        _BOX + "is that of {first}, too. Remove one of them.",
        first=lambda position: records.annotation_name(first_of[position]),
    )
