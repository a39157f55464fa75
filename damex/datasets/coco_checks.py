"""The one validator of COCO documents: links, classes, counts and boxes.

`damex data check` prints the findings, and the loader raises the first error. Rules are
masks over the columns of `Records`: M images, N annotations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from damex.datasets.coco_boxes import check_boxes
from damex.datasets.coco_records import Records, parse_records, used_boxes
from damex.datasets.coco_schema import Expectations
from damex.datasets.findings import Finding, Location
from damex.errors import did_you_mean


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
        for check in (_check_classes, _check_links, check_boxes, _check_counts):
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
    if (limit := expected.num_queries) is not None:
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
