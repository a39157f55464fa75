"""All findings about a COCO document, for `damex data check`.

The loader raises the first error of the same list.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from damex.datasets.coco_boxes import check_boxes
from damex.datasets.coco_records import (
    Expectations,
    Records,
    check_class_names,
    parse_records,
    read_json,
    readable_records,
    without_dummies,
)
from damex.datasets.findings import Finding, Place, raise_first
from damex.errors import did_you_mean


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
    if not records.images:
        findings.append(
            place.finding("no-images", None, "it lists no images. Correct the file.")
        )
    findings += _check_classes(records, expected.classes)
    findings += _check_links(records)
    with np.errstate(all="ignore"):  # files hold numbers of any size
        findings += check_boxes(records, expected)
    findings += _check_numbers(records, expected)
    return records, findings


def _check_classes(
    records: Records, classes: Sequence[str] | None
) -> Iterator[Finding]:
    """Missing classes that are in use, and headings that are left out."""
    known = [*filter(None, records.categories.values())]
    kind = "unknown-class" if records.place.split == "train" else "class-not-in-file"
    for name in classes or ():
        if name not in known:
            text = (
                f"the file does not list it; {did_you_mean(name, known)} Correct "
                "'classes' in the mixture entry, or add it to the categories, with or "
                "without boxes."
            )
            yield records.place.finding(kind, f"class {name!r}", text)
    for name in records.headings if records.place.split == "train" else ():
        text = (
            "this category is only a heading of others and has no box: it is left out. "
            "To keep it, list it with the others in classes=[...] of the mixture entry."
        )
        yield records.place.finding("dummy-class", f"class {name!r}", text)


def _check_links(records: Records) -> Iterator[Finding]:
    """Annotations of unknown images or categories, and images listed twice."""
    texts = {str(image["id"]) for image in records.images}

    def of_image(position: int) -> str:
        found = records.annotations[position]["image_id"]
        advice = "Correct it, or remove the record."
        if str(found) in texts:
            advice = "An image has this id as another type: write both as numbers."
        return (
            f"image_id {found!r} is not that of an image: the box is left out. {advice}"
        )

    lost = np.flatnonzero(records.image_N < 0)
    yield from records.each("unknown-image-id", "annotations", lost, of_image)
    ids = [*map(repr, records.categories)]
    listed = ", ".join(ids[:10]) + (", ..." if len(ids) > 10 else "")

    def of_category(position: int) -> str:
        found = records.annotations[position]["category_id"]
        return (
            f"category_id {found!r} is not listed: the box is left out. Expected one "
            f"of {listed or 'none'}. Correct it, or add the category."
        )

    known = records.categories.keys()
    unknown = [
        position
        for position, record in enumerate(records.annotations)
        if record["category_id"] not in known
    ]
    yield from records.each("unknown-category-id", "annotations", unknown, of_category)
    yield from _check_file_names(records)


def _check_file_names(records: Records) -> Iterator[Finding]:
    names = [image.get("file_name") for image in records.images]
    first: dict[str, int] = {}
    again = [
        position
        for position, name in enumerate(names)
        if isinstance(name, str) and first.setdefault(name, position) != position
    ]

    def of_image(position: int) -> str:
        other = records.image_name(first[str(names[position])])
        return (
            f"{other} has the same file_name {names[position]!r}; each would teach "
            "that the objects of the other are background. Merge the two."
        )

    yield from records.each("duplicate-file-name", "images", again, of_image)


def _check_numbers(records: Records, expected: Expectations) -> Iterator[Finding]:
    """Findings on box counts by image, and by unused class."""
    names = records.categories
    others = {key for key, name in names.items() if not expected.uses(name)}
    found = [row["category_id"] for row in records.annotations]
    for key, count in Counter(key for key in found if key in others).items():
        text = f"{count} boxes of a class that is not in use are left out."
        where = f"class {names[key]!r}"
        yield records.place.finding("class-not-used", where, text, count=count)
    # By id: images that share an id share their boxes.
    in_use = names.keys() - others
    counts = Counter(
        [row["image_id"] for row in records.annotations if row["category_id"] in in_use]
    )
    images = records.images
    empty = [i for i, image in enumerate(images) if not counts[image["id"]]]

    def name(position: int) -> str:
        named = records.place.root  # the finding already has the path
        return "it" if named else repr(images[position].get("file_name"))

    def of_empty(position: int) -> str:
        return (
            f"{name(position)} has no box: training leaves it out, evaluation does "
            "not. Nothing to do if it shows no object."
        )

    yield from records.each("image-without-boxes", "images", empty, of_empty)
    limit = expected.num_queries
    if limit is None:
        return
    full = [i for i, image in enumerate(images) if counts[image["id"]] > limit]

    def of_full(position: int) -> str:
        return (
            f"{name(position)} has {counts[images[position]['id']]} boxes, and the "
            f"detector has {limit} queries, each of which finds one object at most. "
            "Set model.num_queries higher, or cut the image into tiles."
        )

    yield from records.each("many-boxes", "images", full, of_full)


def read_class_names(path: Path, dataset: str) -> tuple[str, ...]:
    """Names of the categories of a COCO file, in file order, without empty headings.

    Only this list is parsed: the whole of a large file takes many seconds.

    Raises:
        DataError: If the file is missing, is not JSON, or has no valid categories.
    """
    text, categories = "", None
    with contextlib.suppress(OSError, UnicodeDecodeError):  # reported by read_coco
        text = path.read_text(encoding="utf-8-sig")
    keys = list(re.finditer(r'(?<!\\)"categories"\s*:\s*', text))
    if len(keys) == 1:  # otherwise one may be nested in another record
        with contextlib.suppress(json.JSONDecodeError):
            categories, _ = json.JSONDecoder().raw_decode(text, keys[0].end())
    if not isinstance(categories, list):
        categories = read_coco(path, dataset)["categories"]
    place = Place(dataset, str(path))
    categories, findings = readable_records(categories, "categories", place)
    raise_first(findings)
    real = without_dummies(categories, (), key="id")
    headings = [c["id"] for c in categories if c not in real]
    used = {
        number
        for number in headings
        if re.search(rf'"category_id"\s*:\s*{re.escape(json.dumps(number))}\b', text)
    }
    kept = without_dummies(categories, used, key="id")
    raise_first(check_class_names(kept, place))
    return tuple(str(category["name"]) for category in kept)


def read_coco(path: Path, dataset: str) -> dict[str, Any]:
    """Load a COCO file with valid fields, ids and class names; boxes are not checked.

    Raises:
        DataError: If the file is missing, is not JSON, or holds anything else.
    """
    place = Place(dataset, str(path))
    document, findings = read_json(path, place)
    if not findings:
        _, findings = parse_records(document, place)
    raise_first(findings)
    return document
