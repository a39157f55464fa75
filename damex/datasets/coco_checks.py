"""The one validator of COCO documents: links, classes, counts and boxes.

`damex data check` prints the findings, and the loader raises the first error. Rules are
masks over the columns of `Records`: M images, N annotations.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from damex.datasets.coco_records import Records, parse_records, used_boxes
from damex.datasets.coco_schema import Expectations, is_number
from damex.datasets.findings import Finding, Location
from damex.datasets.windows import advice_for, sides_in_training
from damex.errors import did_you_mean

# A box that crosses the border by more is reported as clipped.
BORDER = 1.0
# Below half a cell of the finest feature map of a DETR (stride 8).
TINY = 4.0
TINY_SHARE = 0.1
# Many suspect boxes mean another format; a few are single mistakes.
SUSPICIOUS_COUNT = 3
SUSPICIOUS_SHARE = 0.1
# No longer a suspicion if this share of the boxes ends this far beyond the image.
CERTAIN_SHARE, CERTAIN_END = 0.3, 1.1
# Problems of boxes that on_bad_box='drop' leaves out.
DROPPED = ("box-negative", "box-outside")
CORRECT = "Correct the record, or remove it."


def check_coco(
    document: Any, location: Location, expected: Expectations
) -> tuple[Records | None, list[Finding]]:
    """Find errors and oddities in a COCO document (the content of a JSON file).

    Returns:
        The readable records (None if a list is missing), and the findings.
    """
    records, findings = parse_records(document, location, expected.classes)
    if records is None:
        return None, findings
    with np.errstate(all="ignore"):  # files hold numbers of any size
        for check in (_check_classes, _check_links, _check_boxes, _check_counts):
            findings += check(records, expected)
    return records, findings


def _check_classes(records: Records, expected: Expectations) -> Iterator[Finding]:
    """Missing classes that are in use, headings that are left out, and no images."""
    location = records.location
    if not records.images:
        text = "it lists no images. Correct the file."
        yield location.finding("no-images", None, text)
    known = [*filter(None, records.categories.values())]
    kind = "unknown-class" if location.split == "train" else "class-not-in-file"
    for name in expected.classes or ():
        if name not in known:
            text = (
                f"the file does not list it; {did_you_mean(name, known)} Correct "
                "'classes' in the mixture entry, or add it to the categories, with or "
                "without boxes."
            )
            yield location.finding(kind, f"class {name!r}", text)
    for name in records.headings if location.split == "train" else ():
        text = (
            "this category is only a heading of others and has no box: it is left out. "
            "To keep it, list it with the others in classes=[...] of the mixture entry."
        )
        yield location.finding("dummy-class", f"class {name!r}", text)


def _check_links(records: Records, _: Expectations) -> Iterator[Finding]:
    """Annotations of unknown images or categories, and images listed twice."""
    rows, images = records.annotations, records.images
    yield from records.each(
        "unknown-image-id",
        records.image_N < 0,
        lambda i: (
            f"image_id {rows[i]['image_id']!r} is not that of an image: the box is "
            "left out. Correct it (a number and a text are different ids), or remove "
            "the record."
        ),
    )
    keys = [*records.categories]
    known = (", ".join(map(repr, keys[:10])) or "none") + ", ..." * (len(keys) > 10)
    yield from records.each(
        "unknown-category-id",
        records.class_N < 0,
        lambda i: (
            f"category_id {rows[i]['category_id']!r} is not listed: the box is left "
            f"out. Expected one of {known}. Correct it, or add the category."
        ),
    )
    names = [image.get("file_name") for image in images]
    first: dict[Any, int] = {}
    again = [
        isinstance(name, str) and first.setdefault(name, position) != position
        for position, name in enumerate(names)
    ]
    yield from records.each(
        "duplicate-file-name",
        again,
        lambda i: (
            f"{records.image_name(first[names[i]])} has the same file_name "
            f"{names[i]!r}; each would teach that the objects of the other are "
            "background. Merge the two."
        ),
        of_images=True,
    )


def _check_counts(records: Records, expected: Expectations) -> Iterator[Finding]:
    """Findings on box counts by image, and by unused class."""
    names = [*records.categories.values()]
    in_use = {i for i, name in enumerate(names) if expected.uses(name)}
    for number, count in Counter(records.class_N.tolist()).items():
        if number >= 0 and number not in in_use:
            text = f"{count} boxes of a class that is not in use are left out."
            where = f"class {names[number]!r}"
            yield records.location.finding("class-not-used", where, text, count=count)
    # Images that share an id share their boxes.
    image_of = {image["id"]: i for i, image in enumerate(records.images)}
    shared_M = np.array([image_of[image["id"]] for image in records.images], int)
    image_B = records.image_N[used_boxes(records, expected)]
    count_M = np.bincount(image_B, minlength=len(records.images))[shared_M]

    def image(position: int) -> str:
        named = records.location.root  # the finding already has the path
        return "it" if named else repr(records.images[position].get("file_name"))

    yield from records.each(
        "image-without-boxes",
        count_M == 0,
        lambda i: (
            f"{image(i)} has no box: training leaves it out, evaluation does not. "
            "Nothing to do if it shows no object."
        ),
        of_images=True,
    )
    if (limit := expected.num_queries) is not None and expected.tile is None:
        yield from records.each(
            "many-boxes",
            count_M > limit,
            lambda i: (
                f"{image(i)} has {count_M[i]} boxes, and the detector has {limit} "
                "queries, each of which finds one object at most. Set "
                "model.num_queries higher, or cut the image into tiles."
            ),
            of_images=True,
        )


def usable_boxes(records: Records, expected: Expectations) -> np.ndarray:
    """Positions of the boxes of an error-free file that training and evaluation use."""
    used_N = used_boxes(records, expected) & records.is_box_N
    return np.flatnonzero(_without_dropped(used_N, _problems_of_shape(records, used_N)))


@np.errstate(all="ignore")  # sums of NaN and of infinity
def _problems_of_shape(records: Records, used_N: np.ndarray) -> dict[str, np.ndarray]:
    """Masks (N,) of used boxes by their first problem."""
    x, y, w, h = records.box_N4.T
    width, height = records.size_N2.T
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
    rest = used_N
    for kind, mask_N in masks.items():
        masks[kind], rest = rest & mask_N, rest & ~mask_N
    return masks


def _without_dropped(used_N: np.ndarray, problems: dict[str, np.ndarray]) -> np.ndarray:
    return used_N & ~np.any([problems[kind] for kind in DROPPED], axis=0)


def _check_boxes(records: Records, expected: Expectations) -> Iterator[Finding]:
    """Findings about boxes and areas; at most one about the shape of each box."""
    used_N = used_boxes(records, expected)
    rows = records.annotations
    yield from records.each(
        "box-format",
        used_N & ~records.is_box_N,
        lambda i: (
            "bbox must be [x, y, width, height] in pixels, got "
            f"{rows[i].get('bbox')!r:.120}."
        ),
    )
    used_N = used_N & records.is_box_N
    finite_N = np.isfinite(records.box_N4).all(axis=1)
    text = f"must have finite numbers. {CORRECT}"
    yield from records.each_box("box-not-finite", used_N & ~finite_N, text)
    used_N = used_N & finite_N
    suspicion = _check_format(records, used_N)
    yield from filter(None, [suspicion])
    if suspicion is not None and suspicion.level == "error":
        return  # the cause instead of its consequences
    problems = _problems_of_shape(records, used_N)
    drops = expected.on_bad_box == "drop"
    texts = _texts_of_shape(records, drops=drops)
    for kind, mask_N in problems.items():
        if suspicion is None or kind != "box-partly-outside":
            level = "warning" if drops and kind in DROPPED else None
            yield from records.each_box(kind, mask_N, texts[kind], level)
    used_N = _without_dropped(used_N, problems)
    if expected.scales:
        sound_N = used_N & ~problems["box-zero-size"] & ~problems["box-thin"]
        scale = max(expected.scales, key=min)
        box_N4, size_N2 = records.box_N4, records.size_N2
        side_N = sides_in_training(box_N4, size_N2, scale, expected.tile)
        yield from _check_tiny(records, sound_N, side_N, scale)
        advice = advice_for(box_N4[sound_N], size_N2[sound_N], scale)
        is_whole = expected.tile is None and records.location.split == "train"
        if is_whole and advice.tile is not None:
            name, tile = records.location.dataset, advice.tile
            text = (
                f"{advice.reason}. tile={tile} in the mixture entry (damex train "
                f"--tile {shlex.quote(f'{name}={tile}')}) shows windows of {tile} px, "
                f"in which objects look larger; an image is then {advice.views} views "
                "in evaluation and prediction."
            )
            yield records.location.finding(
                "boxes-small", None, text, count=advice.small
            )
    yield from _check_areas(records, used_N)
    yield from _check_use(records, used_N, expected)
    yield from _check_duplicates(records, used_N)


def _texts_of_shape(records: Records, *, drops: bool) -> dict[str, Any]:
    """Messages about boxes by their problem of shape."""
    splits = ["test"] if records.location.split == "test" else ["train", "val"]
    options = " ".join(f"{name}_dataloader.dataset.on_bad_box=drop" for name in splits)
    advice = (
        "Correct the record (is it [x1, y1, x2, y2], or for another image size?), or "
        f"leave such boxes out with --cfg-options {options}."
    )
    advice = "on_bad_box='drop' leaves it out." if drops else advice

    def image(position: int) -> str:
        return "the image ({:g} x {:g} px)".format(*records.size_N2[position])

    return {
        "box-negative": (
            f"has a negative width or height; expected both above 0. {advice}"
        ),
        "box-outside": lambda i: f"lies outside of {image(i)}. {advice}",
        "box-zero-size": f"has a side of 0: training leaves it out. {CORRECT}",
        "box-thin": f"has a side below 1 px: training leaves it out. {CORRECT}",
        "box-partly-outside": lambda i: (
            f"reaches over the border of {image(i)}: training clips it. {CORRECT}"
        ),
    }


def _check_format(records: Records, used_N: np.ndarray) -> Finding | None:
    """Boxes that together look like shares of the image, or like corners."""
    known_N = used_N & np.isfinite(records.size_N2).all(axis=1)
    box_B4, size_B2 = records.box_N4[known_N], records.size_N2[known_N]
    count, first_B2, second_B2 = len(box_B4), box_B4[:, :2], box_B4[:, 2:]
    end_B2 = first_B2 + second_B2
    if not count:
        return None
    near = (first_B2 >= -1).all() and (end_B2 <= 2).all() and (size_B2 > 2).all()
    is_share = (end_B2 <= 1.01).all() or (box_B4 % 1 != 0).any()
    if near and is_share and (second_B2 > 0).all():
        total = int(used_N.sum())
        text = (
            f"all {total} boxes lie within [0, 1] or nearly: they look like shares of "
            "the image; expected pixels. Multiply them by width and height of their "
            "images."
        )
        return records.location.finding("box-normalised", None, text, count=total)
    beyond = int((end_B2 > size_B2 + BORDER).any(axis=1).sum())
    fits_B2 = (second_B2 >= first_B2) & (second_B2 <= size_B2 + BORDER)
    fits_B2 &= first_B2 >= -BORDER
    if beyond < max(SUSPICIOUS_COUNT, SUSPICIOUS_SHARE * count) or not fits_B2.all():
        return None
    far = (end_B2 > CERTAIN_END * size_B2).any(axis=1).sum()
    level = None if far > CERTAIN_SHARE * count else "warning"
    text = (
        f"{beyond} of {count} boxes reach over the border as [x, y, width, height], "
        "and none as [x1, y1, x2, y2]: they may be corners. If so, write "
        "[x1, y1, x2 - x1, y2 - y1]."
    )
    return records.location.finding("box-xyxy", None, text, level=level, count=count)


def _check_tiny(
    records: Records, used_N: np.ndarray, side_N: np.ndarray, scale: tuple[float, float]
) -> Iterator[Finding]:
    """One finding for each class with many boxes that become tiny after resizing."""
    small_N = used_N & (side_N < TINY)
    names = np.array([*records.categories.values(), ""], object)
    for name in sorted({*names[np.unique(records.class_N[small_N])]} - {""}):
        of_class_N = (names == name)[records.class_N]
        small = np.flatnonzero(small_N & of_class_N)
        total = int((used_N & of_class_N).sum())
        if len(small) < TINY_SHARE * total:
            continue
        text = (
            f"{len(small)} of {total} boxes, such as that of "
            f"{records.annotation_name(small[0])}, are below {TINY:g} px "
            f"where images are scaled to {scale[0]:g} x {scale[1]:g}; a detector "
            "hardly sees them. Set a (smaller) tile or a larger image_size."
        )
        where = f"class {name!r}"
        yield records.location.finding("box-tiny", where, text, count=len(small))


def _check_areas(records: Records, used_N: np.ndarray) -> Iterator[Finding]:
    """Compare ``area`` with the box; that of a mask may be smaller."""
    missing = np.flatnonzero(used_N & ~records.has("area", is_number))
    if len(missing):
        text = (
            f"{len(missing)} of {used_N.sum()} annotations have no 'area', such as "
            f"{records.annotation_name(missing[0])}; width times height is taken. "
            "Nothing to do without masks."
        )
        yield records.location.finding("area-missing", None, text, count=len(missing))
    w, h = records.box_N4[:, 2:].T
    area_N, has_size_N = records.area_N, used_N & (w >= 1) & (h >= 1)
    # Some tools count the pixels on both borders.
    large_N = area_N > (w + 2) * (h + 2)
    small_N = (area_N < np.maximum(w - 2, 0) * np.maximum(h - 2, 0)) & (area_N > 0)
    small_N &= ~records.has("segmentation")
    yield from records.each_box(
        "area-zero",
        (area_N <= 0) & has_size_N,
        lambda i: (
            f"has the area {area_N[i]:g}, expected above 0: training leaves it out. "
            "Correct it."
        ),
    )
    for mask_N, limit, level in (
        (large_N, "at most width times height", None),
        (small_N, "width times height without a mask", "info"),
    ):

        def message(position: int, limit: str = limit) -> str:
            return f"has the area {area_N[position]:g}, expected {limit}. Correct it."

        kind = "area-inconsistent"
        yield from records.each_box(kind, mask_N & has_size_N, message, level)


def _check_use(
    records: Records, used_N: np.ndarray, expected: Expectations
) -> Iterator[Finding]:
    """Findings on boxes that training does not use, and files with only such boxes."""
    ignored_N = used_N & records.is_set("ignore")
    text = (
        "is marked 'ignore': training leaves it out, evaluation does not. To leave it "
        "out of both, set iscrowd=1."
    )
    yield from records.each_box("box-ignored", ignored_N, text)
    crowd_N = used_N & records.is_set("iscrowd")
    thin_N = used_N & (records.box_N4[:, 2:].min(axis=1) < 1)
    lost_N = ignored_N | crowd_N | thin_N | (records.area_N <= 0)
    filters = records.location.split == "train" and expected.filter_empty
    if filters and records.images and not (used_N & ~lost_N).any():
        names = [*(expected.classes or records.categories.values())]
        shown = f"{names[:10]}{' and others' * (len(names) > 10)}"
        text = (
            f"there is nothing to train on: of {used_N.sum()} boxes of {shown}, "
            f"{crowd_N.sum()} are crowds (iscrowd) and {thin_N.sum()} have a side "
            "below 1 px. Correct the file, or 'classes' in the mixture entry."
        )
        yield records.location.finding("nothing-to-train", None, text, level="error")


def _check_duplicates(records: Records, used_N: np.ndarray) -> Iterator[Finding]:
    """Boxes that occur twice in an image, with the same class."""
    columns = records.image_N, records.class_N, records.box_N4
    key_B6 = np.column_stack([column[used_N] for column in columns])
    order_B = np.lexsort(key_B6.T)
    key_B6, position_B = key_B6[order_B], np.flatnonzero(used_N)[order_B]
    equal = (key_B6[1:] == key_B6[:-1]).all(axis=1)
    first_N = np.full(len(used_N), -1)
    first_N[position_B[1:][equal]] = position_B[:-1][equal]
    yield from records.each_box(
        "duplicate-box",
        first_N >= 0,
        lambda i: (
            f"is that of {records.annotation_name(int(first_N[i]))}, too. Remove one "
            "of them."
        ),
    )
