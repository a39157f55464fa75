"""Boxes of COCO documents, and findings about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from damex.datasets.coco_records import Expectations, Records
from damex.datasets.findings import Finding, Place

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
    positions = [
        position
        for position in np.flatnonzero(records.image_N >= 0).tolist()
        if records.annotations[position]["category_id"] in used
    ]
    boxes = [records.annotations[i].get("bbox") for i in positions]
    malformed: list[int] = []
    if not _are_boxes(boxes):
        malformed = [i for i, b in zip(positions, boxes, strict=True) if not _is_box(b)]
        bad = set(malformed)
        positions = [i for i in positions if i not in bad]
        boxes = [records.annotations[i]["bbox"] for i in positions]
    flat = np.fromiter(chain.from_iterable(boxes), np.float64, 4 * len(boxes))
    position_B = np.array(positions, np.int64)
    size_B2 = records.size_M2[records.image_N[position_B]]
    return Boxes(position_B, flat.reshape(-1, 4), size_B2), malformed


def _are_boxes(boxes: list[Any]) -> bool:
    """Whether all are boxes; much faster than one by one."""
    return (
        {*map(type, boxes)} <= {list}
        and {*map(len, boxes)} <= {4}
        and {*map(type, chain.from_iterable(boxes))} <= {int, float}
    )


def _is_box(box: Any) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(map(is_number, box))


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number, including NaN and infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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

    def of_format(position: int) -> str:
        found = records.annotations[position].get("bbox")
        return f"bbox must be [x, y, width, height] in pixels, got {found!r:.120}."

    yield from records.each("box-format", "annotations", malformed, of_format)
    is_finite_B = np.isfinite(boxes.box_B4).all(axis=1)
    text = "must have finite numbers. Correct the record, or remove it."
    yield from _each(records, "box-not-finite", boxes.keep(~is_finite_B), text)
    boxes = boxes.keep(is_finite_B)
    if _are_normalised(boxes):  # the cause instead of its consequences
        text = (
            f"all {len(boxes.box_B4)} boxes lie within [0, 1]: they look like shares "
            "of the image; expected pixels. Multiply them by width and height of their "
            "images."
        )
        count = len(boxes.box_B4)
        yield records.place.finding("box-normalised", None, text, count=count)
        return
    faults = faults_of_shape(boxes)
    corners = [*_corners(boxes, records.place)]
    yield from corners
    yield from _check_shapes(records, boxes, faults, expected, quiet=bool(corners))
    boxes = boxes.keep(~np.any([faults[kind] for kind in DROPPED], axis=0))
    yield from _check_areas(records, boxes)
    yield from _check_use(records, boxes, expected)
    yield from _duplicates(records, boxes)


def _each(
    records: Records,
    kind: str,
    boxes: Boxes,
    text: str,
    level: str | None = None,
) -> Iterator[Finding]:
    """A finding for each box; ``text`` may contain {size} and {area}."""

    def of_box(position: int) -> str:
        record = records.annotations[position]
        width, height = records.size_M2[records.image_N[position]]
        words = text.replace("{size}", f"{width:g} x {height:g} px")
        words = words.replace("{area}", f"{area_of(record):g}")
        return f"the box [x, y, width, height] = {record['bbox']} {words}"

    yield from records.each(kind, "annotations", boxes.position_B, of_box, level=level)


def _are_normalised(boxes: Boxes) -> bool:
    boxes = boxes.keep(np.isfinite(boxes.size_B2).all(axis=1))
    first_B2, second_B2 = boxes.box_B4[:, :2], boxes.box_B4[:, 2:]
    return bool(
        len(boxes.box_B4)
        and (first_B2 >= 0).all()
        and (first_B2 + second_B2 <= 1.01).all()
        and (second_B2 > 0).all()
        and (boxes.size_B2 > 2).all()
    )


def _corners(boxes: Boxes, place: Place) -> Iterator[Finding]:
    """Boxes that look like [x1, y1, x2, y2], judged from all of them together."""
    boxes = boxes.keep(np.isfinite(boxes.size_B2).all(axis=1))
    count = len(boxes.box_B4)
    first_B2, second_B2 = boxes.box_B4[:, :2], boxes.box_B4[:, 2:]
    beyond_B = (first_B2 + second_B2 > boxes.size_B2 + BORDER).any(axis=1)
    fits_B2 = (second_B2 >= first_B2) & (second_B2 <= boxes.size_B2 + BORDER)
    beyond = int(beyond_B.sum())
    enough = max(SUSPICIOUS_COUNT, SUSPICIOUS_SHARE * count)
    if beyond < enough or not fits_B2.all() or not (first_B2 >= 0).all():
        return
    text = (
        f"{beyond} of {count} boxes reach over the border as [x, y, width, height], "
        "and none as [x1, y1, x2, y2]: they may be corners. If so, write "
        "[x1, y1, x2 - x1, y2 - y1]."
    )
    yield place.finding("box-xyxy", None, text, count=count)


def _check_shapes(
    records: Records,
    boxes: Boxes,
    faults: Mapping[str, np.ndarray],
    expected: Expectations,
    *,
    quiet: bool,
) -> Iterator[Finding]:
    """Findings on single boxes; ``quiet`` omits those that a suspicion explains."""
    splits = ["test"] if records.place.split == "test" else ["train", "val"]
    drop = " ".join(f"{split}_dataloader.dataset.on_bad_box=drop" for split in splits)
    for kind, mask_B in faults.items():
        if quiet and kind == "box-partly-outside":
            continue
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
    if expected.scales:
        sound = ~np.any([*faults.values()], axis=0) | faults["box-partly-outside"]
        yield from _tiny(records, boxes.keep(sound), max(expected.scales, key=min))


def _tiny(
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
        sides = side_B[names == name]
        small = int((sides < TINY).sum())
        if small < TINY_SHARE * len(sides):
            continue
        first = int(boxes.position_B[(names == name) & (side_B < TINY)][0])
        text = (
            f"{small} of {len(sides)} boxes, such as that of "
            f"{records.annotation_name(first)}, are below {TINY:g} px where images are "
            f"scaled to {scale[0]:g} x {scale[1]:g}; a detector hardly sees them. "
            "Train at a larger size."
        )
        yield records.place.finding("box-tiny", f"class {name!r}", text, count=small)


def area_of(record: Mapping[str, Any]) -> float:
    """The area of an annotation, by default that of its box."""
    area = record.get("area")
    _, _, width, height = record["bbox"]
    return width * height if area is None or not is_number(area) else area


def _check_areas(records: Records, boxes: Boxes) -> Iterator[Finding]:
    """Compare ``area`` with the box; that of a mask may be smaller."""
    rows = [records.annotations[position] for position in boxes.position_B.tolist()]
    stated = [row.get("area") for row in rows]
    if not {*map(type, stated)} <= {int, float}:
        missing = [i for i, area in enumerate(stated) if not is_number(area)]
        first = records.annotation_name(int(boxes.position_B[missing[0]]))
        text = (
            f"{len(missing)} of {len(rows)} annotations have no 'area', such as "
            f"{first}; width times height is taken. Nothing to do without masks."
        )
        yield records.place.finding("area-missing", None, text, count=len(missing))
        stated = [area_of(row) for row in rows]
    area_B = np.array(stated, np.float64)
    w, h = boxes.box_B4[:, 2], boxes.box_B4[:, 3]
    has_size_B = (w >= 1) & (h >= 1)
    zero_B = (area_B <= 0) & has_size_B
    # Some tools count the pixels on both borders.
    large_B = (area_B > (w + 2) * (h + 2)) & has_size_B
    small_B = (area_B < np.maximum(w - 2, 0) * np.maximum(h - 2, 0)) & (area_B > 0)
    small_B &= has_size_B
    for row in np.flatnonzero(small_B):
        small_B[row] = not rows[row].get("segmentation")
    other = "area-inconsistent"
    for kind, mask_B, fault, level in (
        ("area-zero", zero_B, "expected above 0: training leaves it out", None),
        (other, large_B, "expected at most width times height", None),
        (other, small_B, "expected width times height, as there is no mask", "info"),
    ):
        text = f"has the area {{area}}, {fault}. Correct it."
        yield from _each(records, kind, boxes.keep(mask_B), text, level)


def _check_use(
    records: Records, boxes: Boxes, expected: Expectations
) -> Iterator[Finding]:
    """Findings on boxes that training does not use, and files with only such boxes."""
    rows = [records.annotations[position] for position in boxes.position_B.tolist()]
    ignored = np.array([bool(row.get("ignore")) for row in rows], bool)
    text = "is marked 'ignore': training leaves it out."
    yield from _each(records, "box-ignored", boxes.keep(ignored), text)
    if records.place.split != "train" or not expected.filter_empty:
        return
    sides_B = np.min(boxes.box_B4[:, 2:], axis=1) >= 1
    large = [rows[i] for i in np.flatnonzero(sides_B).tolist()]
    trains = (
        not row.get("iscrowd") and not row.get("ignore") and not area_of(row) <= 0
        for row in large
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


def _duplicates(records: Records, boxes: Boxes) -> Iterator[Finding]:
    """Boxes that occur twice in an image, with the same class."""
    if len(boxes.position_B) == 0:
        return
    number = {key: i for i, key in enumerate(records.categories)}
    category_of = (
        number[records.annotations[position]["category_id"]]
        for position in boxes.position_B.tolist()
    )
    category_B = np.fromiter(category_of, np.int64, len(boxes.position_B))
    image_B = records.image_N[boxes.position_B]
    key_B6 = np.column_stack([image_B, category_B, boxes.box_B4]) + 0.0  # no -0.0
    # Equal rows have equal hashes: sorting these is much quicker than sorting rows.
    factors_6 = np.random.default_rng(0).integers(1, 2**62, 6) * 2 + 1
    hash_B = (key_B6.view(np.int64) * factors_6).sum(axis=1)
    hash_B ^= hash_B >> 29
    order_B = np.argsort(hash_B, kind="stable")
    equal = (key_B6[order_B[1:]] == key_B6[order_B[:-1]]).all(axis=1)
    first_B, second_B = (boxes.position_B[o] for o in (order_B[:-1], order_B[1:]))
    first_of = dict(zip(second_B[equal].tolist(), first_B[equal].tolist(), strict=True))

    def text(position: int) -> str:
        shown = records.annotations[position]["bbox"]
        return (
            f"the box [x, y, width, height] = {shown} is that of "
            f"{records.annotation_name(first_of[position])}, too. Remove one of them."
        )

    again = sorted(first_of)
    yield from records.each("duplicate-box", "annotations", again, text)
