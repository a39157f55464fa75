"""The records of a COCO document as columns, with what hinders reading them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from damex.curation.findings import Finding, Place, Said

LISTS = ("images", "annotations", "categories")


@dataclass(frozen=True)
class Records:
    """The readable records of a document.

    Axes: M images, N annotations.

    Args:
        images: Records with an id.
        annotations: Records with an image id and a category id.
        categories: Id -> name; empty where the record has none.
        size_M2: Width and height in pixels; NaN where they are not known.
        image_N: Position of each annotation's image; -1 where it is not listed.
    """

    images: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    categories: dict[Any, str]
    size_M2: np.ndarray
    image_N: np.ndarray

    def image_name(self, position: int) -> str:
        """The file name of an image, for messages."""
        return repr(self.images[position].get("file_name"))

    def annotation_name(self, position: int) -> str:
        """An annotation, for messages."""
        return f"annotation {self.annotations[position].get('id')}"


def read_document(place: Place) -> tuple[Any, list[Finding]]:
    """Read the JSON file of a place.

    Returns:
        What it holds, or None, and what hinders reading it.
    """
    file = Path(place.file)
    if not file.is_file():
        text = (
            f"there is no such annotation file (seen from {Path.cwd()}). Correct the "
            "path, or data_root and the split in the mixture entry."
        )
        return None, [place.finding("file-missing", None, text)]
    try:
        return json.loads(file.read_text(encoding="utf-8-sig")), []
    except ValueError as error:  # not JSON, or not text
        text = f"expected a JSON file, and it cannot be read ({error}). Write it anew."
        return None, [place.finding("not-json", None, text)]


def parse_records(document: Any, place: Place) -> tuple[Records | None, list[Finding]]:
    """Find the readable records of a COCO document.

    Args:
        document: What a JSON file holds.
        place: Where it is from.

    Returns:
        The records, None where a list lacks, and a finding for each fault.
    """
    findings = [*_lacking_lists(document, place)]
    if findings:
        return None, findings
    rows: dict[str, list[dict[str, Any]]] = {}
    for key, check in zip(
        LISTS, (_image_faults, _annotation_faults, _category_faults), strict=True
    ):
        rows[key] = []
        for position, record in enumerate(document[key]):
            kept, faults = _read_record(record, check)
            if kept:
                rows[key].append(record)
            for kind, text in faults:
                name = f"{_SINGULAR[key]} {_name_of(record, position)}"
                findings.append(place.finding(kind, name, text))
    for key in LISTS:
        findings += _duplicate_ids(rows[key], key, place)
    return _columns(rows), findings


_SINGULAR = {"images": "image", "annotations": "annotation", "categories": "category"}


def _lacking_lists(document: Any, place: Place) -> Iterator[Finding]:
    if not isinstance(document, Mapping):
        text = (
            f"expected an object with the lists {', '.join(LISTS)}, got a "
            f"{type(document).__name__}. Is it a COCO file of a dataset?"
        )
        yield place.finding("wrong-type", None, text)
        return
    for key in LISTS:
        if key not in document:
            text = f"there is no list {key!r}; a COCO file has {', '.join(LISTS)}."
            yield place.finding("missing-list", key, text)
        elif not isinstance(document[key], list):
            found = type(document[key]).__name__
            text = f"expected a list of records in {key!r}, got a {found}."
            yield place.finding("wrong-type", key, text)


def _name_of(record: Any, position: int) -> str:
    is_known = isinstance(record, Mapping) and _is_id(record.get("id"))
    return str(record["id"]) if is_known else f"number {position + 1} of the list"


def _read_record(record: Any, check: Any) -> tuple[bool, list[tuple[str, str]]]:
    """Whether a record can be used at all, and its faults as (kind, text)."""
    if not isinstance(record, Mapping):
        text = f"expected an object with fields, got {record!r:.80}."
        return False, [("wrong-type", text)]
    return check(record)


def _image_faults(record: Mapping[str, Any]) -> tuple[bool, list[tuple[str, str]]]:
    faults = [*_id_faults(record, "id")]
    kept = not faults
    name = record.get("file_name")
    if name is None:
        faults.append(_lacking("file_name"))
    elif not isinstance(name, str) or not name:
        faults.append(("wrong-type", f"file_name must be a path, got {name!r:.80}."))
    for key in ("width", "height"):
        value = record.get(key)
        if value is None:
            faults.append(_lacking(key))
        elif not is_number(value) or not math.isfinite(value) or value <= 0:
            text = f"{key} must be a number of pixels above 0, got {value!r:.80}."
            faults.append(("wrong-type", text))
    return kept, faults


def _annotation_faults(record: Mapping[str, Any]) -> tuple[bool, list[tuple[str, str]]]:
    faults = [
        fault
        for key in ("image_id", "category_id")
        for fault in _id_faults(record, key)
    ]
    kept = not faults
    return kept, [*faults, *_id_faults(record, "id")]


def _category_faults(record: Mapping[str, Any]) -> tuple[bool, list[tuple[str, str]]]:
    faults = [*_id_faults(record, "id")]
    kept = not faults
    name = record.get("name")
    if name is None:
        faults.append(_lacking("name"))
    elif not isinstance(name, (str, int)) or name == "":
        faults.append(("wrong-type", f"name must be a text, got {name!r:.80}."))
    return kept, faults


def _id_faults(record: Mapping[str, Any], key: str) -> Iterator[tuple[str, str]]:
    value = record.get(key)
    if value is None:
        yield _lacking(key)
    elif not _is_id(value):
        text = f"{key} must be an integer or a text, got {value!r:.80}."
        yield "wrong-type", text


def _lacking(key: str) -> tuple[str, str]:
    return "missing-field", f"there is no {key!r}; add it to the record."


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str, float)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number, NaN and infinity included."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _duplicate_ids(
    rows: list[dict[str, Any]], key: str, place: Place
) -> Iterator[Finding]:
    ids = [record["id"] for record in rows if _is_id(record.get("id"))]
    if len(set(ids)) == len(ids):
        return
    counts = Counter(ids)
    twice = [value for value, count in counts.items() if count > 1]
    name = _SINGULAR[key]

    def describe(position: int) -> Said:
        value = twice[position]
        text = (
            f"{counts[value]} records of {key!r} have the id {value!r}, so that one "
            "would replace the other. Give every record its own id."
        )
        return Said(f"{name} {value}", text)

    yield from place.each(f"duplicate-{name}-id", range(len(twice)), describe)


def _columns(rows: dict[str, list[dict[str, Any]]]) -> Records:
    images, annotations = rows["images"], rows["annotations"]
    size_M2 = np.full((len(images), 2), np.nan)
    for position, image in enumerate(images):
        if not _image_faults(image)[1]:
            size_M2[position] = image["width"], image["height"]
    position_of = {image["id"]: i for i, image in enumerate(images)}
    categories: dict[Any, str] = {}
    for category in rows["categories"]:  # of two with one id, the first
        name = category.get("name")
        categories.setdefault(category["id"], "" if name is None else str(name))
    found = (position_of.get(record["image_id"], -1) for record in annotations)
    return Records(
        images=images,
        annotations=annotations,
        categories=categories,
        size_M2=size_M2,
        image_N=np.fromiter(found, np.int64, len(annotations)),
    )
