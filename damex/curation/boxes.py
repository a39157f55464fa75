"""What can be wrong with boxes, all of a file at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from damex.curation.findings import Finding, Place, Said
from damex.curation.records import Records, is_number

# As damex.datasets.coco: what reaches further over the border is counted as clipped.
BORDER = 1.0
# Below half a cell of the finest feature map of a DETR (stride 8).
TINY = 4.0
TINY_SHARE = 0.1
# Boxes of another format are many at once; a few are single mistakes.
SUSPICIOUS_COUNT = 3
SUSPICIOUS_SHARE = 0.1

# What is said about the shape of a box. A box has the first fault that fits it.
SHAPES = MappingProxyType(
    {
        "box-negative": (
            "has a negative side; expected a width and a height above 0. Correct the "
            "record (are its corners exchanged?), or take it out."
        ),
        "box-outside": (
            "lies outside of the image ({size}). Correct the record (is it [x1, y1, "
            "x2, y2], or for another image size?), or set on_bad_box='drop' in the "
            "MixtureDataset to go on without such boxes."
        ),
        "box-zero-size": (
            "has a side of 0, so that it is left out of training. Correct the record, "
            "or take it out."
        ),
        "box-thin": (
            "has a side below 1 px, so that it is left out of training. Correct the "
            "record, or take it out."
        ),
        "box-partly-outside": (
            "reaches over the border of the image ({size}); training clips it. Correct "
            "the record if that is not meant."
        ),
    }
)
# What on_bad_box='drop' goes on without.
DROPPED = ("box-negative", "box-outside")


@dataclass(frozen=True)
class Expectations:
    """What the config says about the data; nothing without a config.

    Args:
        classes: Names of the classes in use; None for all.
        on_bad_box: ``error``, or ``drop`` for a training that goes on without boxes
            that lie outside.
        image_scale: Sides of the size that images are scaled to, in pixels.
        num_queries: How many objects the detector can find in an image.
        applies_exif: Whether images are loaded as EXIF says that they are shown.
    """

    classes: tuple[str, ...] | None = None
    on_bad_box: str = "error"
    image_scale: tuple[float, float] | None = None
    num_queries: int | None = None
    applies_exif: bool = True

    def uses(self, name: str) -> bool:
        """Whether a training uses the class."""
        return self.classes is None or name in self.classes


@dataclass(frozen=True)
class Boxes:
    """The boxes of the classes in use, in the order of their records.

    Axes: B boxes.

    Args:
        position_B: Position of the annotation.
        box_B4: Left, top, width and height in pixels, NaN where they are not numbers.
        size_B2: Width and height of the image; NaN where they are not known.
    """

    position_B: np.ndarray
    box_B4: np.ndarray
    size_B2: np.ndarray

    def keep(self, mask_B: np.ndarray) -> Boxes:
        """Some of them."""
        return Boxes(self.position_B[mask_B], self.box_B4[mask_B], self.size_B2[mask_B])


def check_boxes(
    records: Records, place: Place, expected: Expectations
) -> Iterator[Finding]:
    """Findings about boxes and areas; at most one about the shape of each box."""
    boxes, malformed = read_boxes(records, expected)

    def describe_format(position: int) -> Said:
        text = (
            "bbox must be [x, y, width, height] in pixels, got "
            f"{records.annotations[position].get('bbox')!r:.120}."
        )
        return Said(records.annotation_name(position), text)

    yield from place.each("box-format", malformed, describe_format)
    is_finite_B = np.isfinite(boxes.box_B4).all(axis=1)
    yield from _listed(
        records,
        place,
        "box-not-finite",
        boxes.keep(~is_finite_B),
        "has to be of finite numbers. Correct the record, or take it out.",
    )
    boxes = boxes.keep(is_finite_B)
    suspicion = _other_format(boxes, place)
    if suspicion is not None:  # the cause, in place of what follows from it
        yield suspicion
    else:
        yield from _check_shapes(records, place, boxes, expected)
    yield from _check_areas(records, place, boxes)
    yield from _duplicates(records, place, boxes)


def read_boxes(records: Records, expected: Expectations) -> tuple[Boxes, Sequence[int]]:
    """Boxes of the classes in use, and the positions of what is no box."""
    used = {key for key, name in records.categories.items() if expected.uses(name)}
    known = records.categories.keys()
    rows, positions, malformed = [], [], []
    for position, record in enumerate(records.annotations):
        category = record["category_id"]
        if category in known and category not in used:
            continue
        box = record.get("bbox")
        if isinstance(box, list) and len(box) == 4 and all(map(is_number, box)):
            rows.append(box)
            positions.append(position)
        else:
            malformed.append(position)
    position_B = np.array(positions, np.int64)
    flat = np.fromiter(chain.from_iterable(rows), np.float64, 4 * len(rows))
    image_B = records.image_N[position_B]
    size_B2 = np.full((len(rows), 2), np.nan)
    size_B2[image_B >= 0] = records.size_M2[image_B[image_B >= 0]]
    return Boxes(position_B, flat.reshape(-1, 4), size_B2), malformed


def scale_and_shape(box: Any, image: Mapping[str, Any]) -> tuple[float, float] | None:
    """How large a box is in its image, and how wide.

    Args:
        box: ``bbox`` of an annotation.
        image: Record of its image.

    Returns:
        Root of its share of the image, and width over height; None for what is no box
        in an image, which is the check's business.
    """
    try:
        _, _, width, height = (float(value) for value in box)
        share = width * height / (image["width"] * image["height"])
    except (TypeError, ValueError, KeyError, ZeroDivisionError):
        return None
    if width > 0 and height > 0 and 0 < share < math.inf:
        return math.sqrt(share), width / height
    return None


def _listed(
    records: Records,
    place: Place,
    kind: str,
    boxes: Boxes,
    text: str | Callable[[int], str],
    level: str | None = None,
) -> Iterator[Finding]:
    """A finding for each box, which is shown with its image."""

    def describe(row: int) -> Said:
        position = int(boxes.position_B[row])
        image = int(records.image_N[position])
        owner = f"image {records.image_name(image)}" if image >= 0 else ""
        said = text if isinstance(text, str) else text(row)
        shown = records.annotations[position]["bbox"]
        whole = f"the box [x, y, width, height] = {shown} {said}"
        return Said(records.annotation_name(position), whole, owner)

    yield from place.each(kind, range(len(boxes.position_B)), describe, level=level)


def _other_format(boxes: Boxes, place: Place) -> Finding | None:
    """Suspect another box format from all boxes together."""
    boxes = boxes.keep(np.isfinite(boxes.size_B2).all(axis=1))
    count = len(boxes.box_B4)
    first_B2, second_B2 = boxes.box_B4[:, :2], boxes.box_B4[:, 2:]
    if count == 0:
        return None
    inside_unit = (first_B2 >= 0).all() and (first_B2 + second_B2 <= 1.01).all()
    if inside_unit and (boxes.size_B2 > 2).all() and (second_B2 > 0).all():
        text = (
            f"all {count} boxes lie within [0, 1]: they look like shares of the image; "
            "expected pixels. Multiply them by width and height of their images."
        )
        return place.finding("box-normalised", None, text, count=count)
    beyond_B = (first_B2 + second_B2 > boxes.size_B2 + BORDER).any(axis=1)
    fits_B2 = (second_B2 >= first_B2) & (second_B2 <= boxes.size_B2 + BORDER)
    beyond = int(beyond_B.sum())
    enough = max(SUSPICIOUS_COUNT, SUSPICIOUS_SHARE * count)
    if beyond >= enough and fits_B2.all() and (first_B2 >= 0).all():
        text = (
            f"{beyond} of {count} boxes reach over the border as [x, y, width, "
            "height], and none as [x1, y1, x2, y2]: they look like corners. Write "
            "[x1, y1, x2 - x1, y2 - y1]."
        )
        return place.finding("box-xyxy", None, text, count=count)
    return None


def _check_shapes(
    records: Records, place: Place, boxes: Boxes, expected: Expectations
) -> Iterator[Finding]:
    """Sort boxes by their first fault, in the terms of damex.datasets.coco."""
    x, y, w, h = boxes.box_B4.T
    width, height = boxes.size_B2.T
    with np.errstate(invalid="ignore"):
        outside = (x >= width) | (y >= height)
        outside |= (x + np.maximum(w, 1) <= 0) | (y + np.maximum(h, 1) <= 0)
        over = np.stack([-x, -y, x + w - width, y + h - height]).max(axis=0)
    found = {
        "box-negative": (w < 0) | (h < 0),
        "box-outside": outside,
        "box-zero-size": (w == 0) | (h == 0),
        "box-thin": (w < 1) | (h < 1),
        "box-partly-outside": over > BORDER,
    }
    rest = np.ones(len(x), bool)
    for kind, mask in found.items():
        chosen = boxes.keep(rest & mask)
        rest &= ~mask
        dropped = kind in DROPPED and expected.on_bad_box == "drop"

        def said(row: int, chosen: Boxes = chosen, kind: str = kind) -> str:
            size = "{:g} x {:g} px".format(*chosen.size_B2[row])
            return SHAPES[kind].format(size=size)

        level = "warning" if dropped else None
        yield from _listed(records, place, kind, chosen, said, level)
    if expected.image_scale is not None:
        yield from _tiny(records, place, boxes.keep(rest), expected.image_scale)


def _tiny(
    records: Records, place: Place, boxes: Boxes, scale: tuple[float, float]
) -> Iterator[Finding]:
    """One finding for each class of which many boxes have hardly a pixel left."""
    # As mmcv scales: neither side grows beyond its own bound.
    factor_B = np.minimum(
        max(scale) / boxes.size_B2.max(axis=1), min(scale) / boxes.size_B2.min(axis=1)
    )
    side_B = np.sqrt(boxes.box_B4[:, 2] * boxes.box_B4[:, 3]) * factor_B
    category_of = [records.annotations[p]["category_id"] for p in boxes.position_B]
    names = np.array([records.categories.get(key, "") for key in category_of], object)
    for name in sorted({*names[side_B < TINY]} - {""}):
        sides = side_B[names == name]
        small = int((sides < TINY).sum())
        if small < TINY_SHARE * len(sides):
            continue
        first = int(boxes.position_B[(names == name) & (side_B < TINY)][0])
        yield place.finding(
            "box-tiny",
            f"class {name!r}",
            f"{small} of {len(sides)} boxes, such as that of "
            f"{records.annotation_name(first)}, are below {TINY:g} px where images are "
            f"scaled to {scale[0]:g} x {scale[1]:g}; a detector hardly sees them. "
            "Train at a larger size.",
            count=small,
        )


def _check_areas(records: Records, place: Place, boxes: Boxes) -> Iterator[Finding]:
    """Compare ``area`` with the box; a mask may well be smaller."""
    rows = [records.annotations[position] for position in boxes.position_B]
    missing = [row for row, record in enumerate(rows) if record.get("area") is None]
    if missing:
        text = (
            f"{len(missing)} of {len(rows)} annotations have no 'area', such as "
            f"{records.annotation_name(int(boxes.position_B[missing[0]]))}; width "
            "times height is taken. Nothing to do where they have no masks."
        )
        count = len(missing)
        yield place.finding("area-missing", None, text, count=count)
    values = (record.get("area", np.nan) for record in rows)
    numbers = (value if is_number(value) else np.nan for value in values)
    area_B = np.fromiter(numbers, np.float64, len(rows))
    w, h = boxes.box_B4[:, 2], boxes.box_B4[:, 3]
    has_size_B = (w >= 1) & (h >= 1)
    zero_B = (area_B <= 0) & has_size_B
    # Some tools count the pixels on both borders.
    large_B = (area_B > (w + 2) * (h + 2)) & has_size_B
    has_no_mask_B = np.array([not record.get("segmentation") for record in rows], bool)
    fits_B = area_B >= np.maximum(w - 2, 0) * np.maximum(h - 2, 0)
    small_B = (area_B > 0) & ~fits_B & has_no_mask_B & has_size_B
    for kind, mask_B, fault, level in (
        ("area-zero", zero_B, "expected above 0: training leaves it out", None),
        ("area-inconsistent", large_B, "expected at most width times height", None),
        (
            "area-inconsistent",
            small_B,
            "expected width times height, as there is no mask",
            "info",
        ),
    ):
        chosen = np.flatnonzero(mask_B)

        def said(row: int, chosen: np.ndarray = chosen, fault: str = fault) -> str:
            return f"has the area {area_B[chosen[row]]:g}, {fault}. Correct it."

        yield from _listed(records, place, kind, boxes.keep(mask_B), said, level)


def _duplicates(records: Records, place: Place, boxes: Boxes) -> Iterator[Finding]:
    """Boxes that stand twice in an image, with the same class."""
    boxes = boxes.keep(records.image_N[boxes.position_B] >= 0)
    if len(boxes.position_B) == 0:
        return
    number = {key: i for i, key in enumerate(records.categories)}
    category_of = (
        number.get(records.annotations[p]["category_id"], -1) for p in boxes.position_B
    )
    category_B = np.fromiter(category_of, np.int64, len(boxes.position_B))
    image_B = records.image_N[boxes.position_B]
    key_B6 = np.column_stack([image_B, category_B, boxes.box_B4])
    order_B = np.lexsort(key_B6.T[::-1])
    equal = (key_B6[order_B[1:]] == key_B6[order_B[:-1]]).all(axis=1)
    first, second = order_B[:-1][equal], order_B[1:][equal]
    by_file = np.argsort(second)
    first, second = first[by_file], second[by_file]

    def said(row: int) -> str:
        other = records.annotation_name(int(boxes.position_B[first[row]]))
        return f"is that of {other}, too. Take one of them out."

    again = Boxes(boxes.position_B[second], boxes.box_B4[second], boxes.size_B2[second])
    yield from _listed(records, place, "duplicate-box", again, said)
