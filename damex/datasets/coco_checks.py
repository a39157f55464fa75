"""The validator of COCO documents, and reading a valid one.

`damex data check` prints the findings, and the loader raises the first error.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
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
    with np.errstate(all="ignore"):  # files hold numbers of any size
        for check in (_check_classes, _check_links, check_boxes, _check_counts):
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
    yield from records.each(
        "unknown-image-id",
        "annotations",
        np.flatnonzero(records.image_N < 0),
        "image_id {record[image_id]!r} is not that of an image: the box is left out. "
        "Correct it (a number and a text are different ids), or remove the record.",
    )
    ids = [*map(repr, records.categories)]
    yield from records.each(
        "unknown-category-id",
        "annotations",
        [
            position
            for position, record in enumerate(records.annotations)
            if record["category_id"] not in records.categories
        ],
        "category_id {record[category_id]!r} is not listed: the box is left out. "
        "Expected one of {known}. Correct it, or add the category.",
        known=(", ".join(ids[:10]) or "none") + ", ..." * (len(ids) > 10),
    )
    names = [image.get("file_name") for image in records.images]
    first: dict[str, int] = {}
    again = [
        position
        for position, name in enumerate(names)
        if isinstance(name, str) and first.setdefault(name, position) != position
    ]
    yield from records.each(
        "duplicate-file-name",
        "images",
        again,
        "{other} has the same file_name {record[file_name]!r}; each would teach that "
        "the objects of the other are background. Merge the two.",
        other=lambda position: records.image_name(first[names[position]]),
    )


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
    count_M = [counts[image["id"]] for image in records.images]
    # A finding about a converted folder already has the path.
    name = "it" if records.place.root else "{record[file_name]!r}"
    yield from records.each(
        "image-without-boxes",
        "images",
        [i for i, count in enumerate(count_M) if not count],
        f"{name} has no box: training leaves it out, evaluation does not. Nothing to "
        "do if it shows no object.",
    )
    limit = expected.num_queries
    yield from records.each(
        "many-boxes",
        "images",
        [i for i, count in enumerate(count_M) if limit is not None and count > limit],
        f"{name} has {{count}} boxes, and the detector has {limit} queries, each of "
        "which finds one object at most. Set model.num_queries higher, or cut the "
        "image into tiles.",
        count=count_M.__getitem__,
    )


def read_coco(path: Path, dataset: str) -> dict[str, Any]:
    """Load a COCO file with valid fields, ids and class names; boxes are not checked.

    Raises:
        DataError: If the file is missing, is not JSON, or holds anything else.
    """
    place = Place(dataset, str(path))
    document, findings = read_json(path, place)
    raise_first(findings or parse_records(document, place)[1])
    return document


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
    used = {
        category["id"]
        for category in categories
        if category not in without_dummies(categories, (), key="id")
        and re.search(rf'"category_id"\s*:\s*{_written(category["id"])}\b', text)
    }
    kept = without_dummies(categories, used, key="id")
    raise_first(check_class_names(kept, place))
    return tuple(str(category["name"]) for category in kept)


def _written(number: Any) -> str:
    return re.escape(json.dumps(number))
