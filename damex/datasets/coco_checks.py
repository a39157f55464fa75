"""The one validator of COCO documents: links, classes, counts and boxes.

`damex data check` prints the findings, and the loader raises the first error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from damex.datasets.coco_records import (
    Expectations,
    Records,
    is_box,
    is_number,
    parse_records,
)
from damex.datasets.findings import Finding, Place
from damex.errors import did_you_mean

# A box that crosses the border by more is reported as clipped.
BORDER = 1.0
# Below half a cell of the finest feature map of a DETR (stride 8).
TINY = 4.0
TINY_SHARE = 0.1
# Many suspect boxes mean another format; a few are single mistakes.
SUSPICIOUS_COUNT = 3
SUSPICIOUS_SHARE = 0.1
# Faults of boxes that on_bad_box='drop' leaves out.
DROPPED = ("box-negative", "box-outside")


def check_coco(
    document: Any, place: Place, expected: Expectations
) -> tuple[Records | None, list[Finding]]:
    """Find errors and oddities in a COCO document (the content of a JSON file).

    Returns:
        The readable records (None if a list is missing), and the findings.
    """
    records, findings = parse_records(document, place, expected.classes)
    if records is None:
        return None, findings
    with np.errstate(all="ignore"):  # files hold numbers of any size
        for check in (_check_classes, _check_links, _check_boxes, _check_counts):
            findings += check(records, expected)
    return records, findings


def _check_classes(records: Records, expected: Expectations) -> Iterator[Finding]:
    """Missing classes that are in use, headings that are left out, and no images."""
    place = records.place
    if not records.images:
        text = "it lists no images. Correct the file."
        yield place.finding("no-images", None, text)
    known = [*filter(None, records.categories.values())]
    kind = "unknown-class" if place.split == "train" else "class-not-in-file"
    for name in expected.classes or ():
        if name not in known:
            text = (
                f"the file does not list it; {did_you_mean(name, known)} Correct "
                "'classes' in the mixture entry, or add it to the categories, with or "
                "without boxes."
            )
            yield place.finding(kind, f"class {name!r}", text)
    for name in records.headings if place.split == "train" else ():
        text = (
            "this category is only a heading of others and has no box: it is left out. "
            "To keep it, list it with the others in classes=[...] of the mixture entry."
        )
        yield place.finding("dummy-class", f"class {name!r}", text)


def _check_links(records: Records, _: Expectations) -> Iterator[Finding]:
    """Annotations of unknown images or categories, and images listed twice."""
    yield from records.each("unknown-image-id", np.flatnonzero(records.image_N < 0))
    keys = [*records.categories]
    known = (", ".join(map(repr, keys[:10])) or "none") + ", ..." * (len(keys) > 10)
    rows = enumerate(records.annotations)
    lost = [i for i, row in rows if row["category_id"] not in records.categories]
    yield from records.each("unknown-category-id", lost, known=known)
    names = [image.get("file_name") for image in records.images]
    first: dict[Any, int] = {}
    again = [
        position
        for position, name in enumerate(names)
        if isinstance(name, str) and first.setdefault(name, position) != position
    ]

    def other(position: int) -> str:
        return records.image_name(first[names[position]])

    yield from records.each("duplicate-file-name", again, other=other)


def _check_counts(records: Records, expected: Expectations) -> Iterator[Finding]:
    """Findings on box counts by image, and by unused class."""
    names = records.categories
    others = {key for key, name in names.items() if not expected.uses(name)}
    found = Counter(row["category_id"] for row in records.annotations)
    for key in filter(others.__contains__, found):
        text = f"{found[key]} boxes of a class that is not in use are left out."
        where = f"class {names[key]!r}"
        yield records.place.finding("class-not-used", where, text, count=found[key])
    # By id: images that share an id share their boxes.
    in_use = names.keys() - others
    counts = Counter(
        row["image_id"] for row in records.annotations if row["category_id"] in in_use
    )
    count_M = np.array([counts[image["id"]] for image in records.images], np.int64)

    def image(position: int) -> str:
        named = records.place.root  # the finding already has the path
        return "it" if named else repr(records.images[position].get("file_name"))

    empty = np.flatnonzero(count_M == 0)
    yield from records.each("image-without-boxes", empty, image=image)
    if (limit := expected.num_queries) is not None:
        full = np.flatnonzero(count_M > limit)
        values: dict[str, Any] = dict(image=image, count=count_M.item, limit=limit)
        yield from records.each("many-boxes", full, **values)


@dataclass(frozen=True)
class Boxes:
    """Boxes (B) of used classes on listed images, in the order of their records.

    ``position_B`` is the annotation's, ``box_B4`` is x, y, width, height in pixels, and
    ``size_B2`` the image's width and height (NaN if unknown).
    """

    records: Records
    position_B: np.ndarray
    box_B4: np.ndarray
    size_B2: np.ndarray

    def keep(self, mask_B: np.ndarray) -> Boxes:
        """Select boxes by a mask."""
        columns = self.position_B, self.box_B4, self.size_B2
        return Boxes(self.records, *(column[mask_B] for column in columns))

    def rows(self) -> list[dict[str, Any]]:
        """The annotations."""
        return [self.records.annotations[p] for p in self.position_B.tolist()]

    def each(
        self, kind: str, mask_B: np.ndarray, level: str | None = None, **values: Any
    ) -> Iterator[Finding]:
        """A finding for each selected box."""
        return self.records.each(kind, self.position_B[mask_B], level, **values)


def read_boxes(records: Records, expected: Expectations) -> tuple[Boxes, list[int]]:
    """Boxes of used classes on listed images, and positions of malformed ones."""
    used = {key for key, name in records.categories.items() if expected.uses(name)}
    positions: list[int] = []
    malformed: list[int] = []
    for position in np.flatnonzero(records.image_N >= 0).tolist():
        record = records.annotations[position]
        if record["category_id"] in used:
            (positions if is_box(record.get("bbox")) else malformed).append(position)
    boxes = chain.from_iterable(records.annotations[i]["bbox"] for i in positions)
    box_B4 = np.fromiter(boxes, np.float64, 4 * len(positions)).reshape(-1, 4)
    position_B = np.array(positions, np.int64)
    size_B2 = records.size_M2[records.image_N[position_B]]
    return Boxes(records, position_B, box_B4, size_B2), malformed


def area_of(record: Mapping[str, Any]) -> float:
    """The area of an annotation, by default that of its box."""
    _, _, width, height = record["bbox"]
    return record["area"] if is_number(record.get("area")) else width * height


@np.errstate(all="ignore")  # sums of NaN and of infinity
def faults_of_shape(boxes: Boxes) -> dict[str, np.ndarray]:
    """Masks (B,) of boxes by their first fault ."""
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
    return _without(boxes, faults_of_shape(boxes), *DROPPED)


def _without(boxes: Boxes, faults: Mapping[str, np.ndarray], *kinds: str) -> Boxes:
    return boxes.keep(~np.any([faults[kind] for kind in kinds], axis=0))


def _check_boxes(records: Records, expected: Expectations) -> Iterator[Finding]:
    """Findings about boxes and areas; at most one about the shape of each box."""
    boxes, malformed = read_boxes(records, expected)

    def shown(position: int) -> str:
        return f"{records.annotations[position].get('bbox')!r:.120}"

    yield from records.each("box-format", malformed, box=shown)
    is_finite_B = np.isfinite(boxes.box_B4).all(axis=1)
    yield from boxes.each("box-not-finite", ~is_finite_B)
    boxes = boxes.keep(is_finite_B)
    suspicion = _check_format(boxes)
    yield from filter(None, [suspicion])
    if suspicion is not None and suspicion.level == "error":
        return  # the cause instead of its consequences
    faults = faults_of_shape(boxes)
    drops = expected.on_bad_box == "drop"
    splits = ["test"] if records.place.split == "test" else ["train", "val"]
    options = " ".join(f"{name}_dataloader.dataset.on_bad_box=drop" for name in splits)
    advice = (
        "Correct the record (is it [x1, y1, x2, y2], or for another image size?), or "
        f"leave such boxes out with --cfg-options {options}."
    )
    advice = "on_bad_box='drop' leaves it out." if drops else advice
    for kind, mask_B in faults.items():
        if suspicion is None or kind != "box-partly-outside":
            level = "warning" if drops and kind in DROPPED else None
            yield from boxes.each(kind, mask_B, level, advice=advice)
    if expected.scales:
        sound = _without(boxes, faults, *DROPPED, "box-zero-size", "box-thin")
        yield from _check_tiny(sound, max(expected.scales, key=min))
    boxes = _without(boxes, faults, *DROPPED)
    yield from _check_areas(boxes)
    yield from _check_use(boxes, expected)
    yield from _check_duplicates(boxes)


def _check_format(boxes: Boxes) -> Finding | None:
    """Boxes that together look like shares of the image, or like corners."""
    total = len(boxes.box_B4)
    known = boxes.keep(np.isfinite(boxes.size_B2).all(axis=1))
    count, size_B2 = len(known.box_B4), known.size_B2
    first_B2, second_B2 = known.box_B4[:, :2], known.box_B4[:, 2:]
    end_B2 = first_B2 + second_B2
    if not count or not (first_B2 >= 0).all():
        return None
    if (end_B2 <= 1.01).all() and (second_B2 > 0).all() and (size_B2 > 2).all():
        kind, text, count = (
            "box-normalised",
            f"all {total} boxes lie within [0, 1]: they look like shares of the image; "
            "expected pixels. Multiply them by width and height of their images.",
            total,
        )
        return boxes.records.place.finding(kind, None, text, count=count)
    beyond = int((end_B2 > size_B2 + BORDER).any(axis=1).sum())
    fits_B2 = (second_B2 >= first_B2) & (second_B2 <= size_B2 + BORDER)
    if beyond < max(SUSPICIOUS_COUNT, SUSPICIOUS_SHARE * count) or not fits_B2.all():
        return None
    text = (
        f"{beyond} of {count} boxes reach over the border as [x, y, width, height], "
        "and none as [x1, y1, x2, y2]: they may be corners. If so, write "
        "[x1, y1, x2 - x1, y2 - y1]."
    )
    return boxes.records.place.finding("box-xyxy", None, text, count=count)


def _check_tiny(boxes: Boxes, scale: tuple[float, float]) -> Iterator[Finding]:
    """One finding for each class with many boxes that become tiny after resizing."""
    records = boxes.records
    # As in mmcv, each side has its own bound.
    factor_B = np.minimum(
        max(scale) / boxes.size_B2.max(axis=1), min(scale) / boxes.size_B2.min(axis=1)
    )
    side_B = np.sqrt(boxes.box_B4[:, 2] * boxes.box_B4[:, 3]) * factor_B
    keys = [row["category_id"] for row in boxes.rows()]
    names = np.array([records.categories[key] for key in keys], object)
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


def _check_areas(boxes: Boxes) -> Iterator[Finding]:
    """Compare ``area`` with the box; that of a mask may be smaller."""
    rows, records = boxes.rows(), boxes.records
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
    large_B = (area_B > (w + 2) * (h + 2)) & has_size_B
    small_B = (area_B < np.maximum(w - 2, 0) * np.maximum(h - 2, 0)) & (area_B > 0)
    small_B &= has_size_B & ~has_mask_B
    yield from boxes.each("area-zero", (area_B <= 0) & has_size_B)
    other, product = "area-inconsistent", "width times height"
    yield from boxes.each(other, large_B, expected=f"at most {product}")
    expected = f"{product} without a mask"
    yield from boxes.each(other, small_B, "info", expected=expected)


def _check_use(boxes: Boxes, expected: Expectations) -> Iterator[Finding]:
    """Findings on boxes that training does not use, and files with only such boxes."""
    rows, records = boxes.rows(), boxes.records
    ignored_B = np.array([bool(row.get("ignore")) for row in rows], bool)
    yield from boxes.each("box-ignored", ignored_B)
    crowd_B = np.array([bool(row.get("iscrowd")) for row in rows], bool)
    area_B = np.array([area_of(row) for row in rows], np.float64)
    thin_B = np.min(boxes.box_B4[:, 2:], axis=1) < 1
    is_lost = (ignored_B | crowd_B | thin_B | (area_B <= 0)).all()
    filters = records.place.split == "train" and expected.filter_empty
    if is_lost and filters and records.images:
        names = [*(expected.classes or records.categories.values())]
        shown = f"{names[:10]}{' and others' * (len(names) > 10)}"
        text = (
            f"there is nothing to train on: of {len(rows)} boxes of {shown}, "
            f"{crowd_B.sum()} are crowds (iscrowd) and {thin_B.sum()} have a side "
            "below 1 px. Correct the file, or 'classes' in the mixture entry."
        )
        yield records.place.finding("nothing-to-train", None, text, level="error")


def _check_duplicates(boxes: Boxes) -> Iterator[Finding]:
    """Boxes that occur twice in an image, with the same class."""
    records = boxes.records
    number = {key: i for i, key in enumerate(records.categories)}
    categories = [number[row["category_id"]] for row in boxes.rows()]
    image_B = records.image_N[boxes.position_B]
    key_B6 = np.column_stack([image_B, categories, boxes.box_B4])
    order_B = np.lexsort(key_B6.T)
    key_B6, position_B = key_B6[order_B], boxes.position_B[order_B]
    equal = (key_B6[1:] == key_B6[:-1]).all(axis=1)
    pairs = zip(position_B[1:][equal], position_B[:-1][equal], strict=True)
    first_of = {int(second): int(first) for second, first in pairs}

    def first(position: int) -> str:
        return records.annotation_name(first_of[position])

    yield from records.each("duplicate-box", sorted(first_of), first=first)
