"""COCO documents: reading them, their records as columns, and problems of fields."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from damex.datasets.coco_schema import (
    FIELDS,
    ID,
    LISTS,
    PIXELS,
    Expectations,
    flag_of,
    is_box,
    is_number,
)
from damex.datasets.findings import (
    MAX_LISTED,
    Finding,
    Location,
    raise_first,
    truncate_findings,
)
from damex.errors import DataError
from damex.files import read_text


@dataclass(frozen=True)
class Records:
    """The readable records of a document: M images, N annotations.

    Args:
        categories: Id -> name; empty if the record has none.
        headings: Names of categories that are only a heading of others.
        size_M2: Width and height in pixels; NaN if unknown.
        image_N: Position of each annotation's image; -1 if it is not listed.
        class_N: Position of its category in ``categories``; -1 if it is not listed.
    """

    location: Location
    images: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    categories: dict[Any, str]
    headings: tuple[str, ...]
    size_M2: np.ndarray
    image_N: np.ndarray
    class_N: np.ndarray

    def has(self, key: str, test: Callable[[Any], bool] = bool) -> np.ndarray:
        """Whether a field of each annotation passes a test; default: is not empty."""
        return np.array([test(row.get(key)) for row in self.annotations], bool)

    def is_set(self, flag: str) -> np.ndarray:
        """Whether a flag of each annotation is true."""
        return self.has(flag, lambda value: bool(flag_of(value)))

    @cached_property
    def is_box_N(self) -> np.ndarray:
        """Whether ``bbox`` is a list of four numbers."""
        return self.has("bbox", is_box)

    @cached_property
    def box_N4(self) -> np.ndarray:
        """x, y, width, height in pixels; NaN if ``bbox`` has another form."""
        box_N4 = np.full((len(self.annotations), 4), math.nan)
        rows = itertools.compress(self.annotations, self.is_box_N)
        values = itertools.chain.from_iterable(row["bbox"] for row in rows)
        box_N4[self.is_box_N] = np.fromiter(values, np.float64).reshape(-1, 4)
        return box_N4

    @cached_property
    def size_N2(self) -> np.ndarray:
        """Width and height of each annotation's image; NaN if unknown."""
        return np.vstack([self.size_M2, [[math.nan] * 2]])[self.image_N]

    @cached_property
    def area_N(self) -> np.ndarray:
        """The areas of annotations, by default those of their boxes."""
        area_N, stated_N = self.box_N4[:, 2:].prod(axis=1), self.has("area", is_number)
        rows = itertools.compress(self.annotations, stated_N)
        area_N[stated_N] = [row["area"] for row in rows]
        return area_N

    def each(
        self,
        kind: str,
        mask: Any,
        text: Callable[[int], str],
        level: str | None = None,
        *,
        of_images: bool = False,
    ) -> Iterator[Finding]:
        """A finding for each annotation or image; one for all beyond ``MAX_LISTED``.

        ``text`` is the message about the record at a position.
        """
        positions = np.flatnonzero(mask)
        name = self.image_name if of_images else self.annotation_name
        for position in positions[:MAX_LISTED].tolist():
            image = position if of_images else int(self.image_N[position])
            listed = self.images[image] if image >= 0 else {}
            has_owner = listed and not of_images
            source = listed.get("source") if self.location.root else None
            yield self.location.finding(
                kind,
                name(position),
                text(position),
                owner=f"image {listed.get('file_name')!r}" if has_owner else "",
                level=level,
                file=f"{self.location.root}/{source}" if source else None,
            )
        rest = len(positions) - MAX_LISTED
        if rest > 0:
            words = f"{rest} more records like the {MAX_LISTED} that are listed."
            yield self.location.finding(kind, None, words, level=level, count=rest)

    def each_box(
        self,
        kind: str,
        mask_N: np.ndarray,
        text: str | Callable[[int], str],
        level: str | None = None,
    ) -> Iterator[Finding]:
        """The same for annotations, with messages that begin with the box."""

        def message(position: int) -> str:
            box = self.annotations[position]["bbox"]
            end = text if isinstance(text, str) else text(position)
            return f"the box [x, y, width, height] = {box} {end}"

        return self.each(kind, mask_N, message, level)

    def image_name(self, position: int) -> str:
        """The id of an image, or its path in a converted folder."""
        image = self.images[position]
        return f"image {image.get('file_name') if self.location.root else image['id']}"

    def annotation_name(self, position: int) -> str:
        """The id of an annotation, or its place in the converted file."""
        record = self.annotations[position]
        if self.location.root and (place := record.get("place")) is not None:
            return f"line {place}" if isinstance(place, int) else str(place)
        return f"annotation {record.get('id')}"


def used_boxes(records: Records, expected: Expectations) -> np.ndarray:
    """Which annotations are of used classes, on listed images."""
    uses = [*map(expected.uses, records.categories.values()), False]
    return (records.image_N >= 0) & np.array(uses)[records.class_N]


def read_json(path: str | Path, location: Location) -> tuple[Any, list[Finding]]:
    """Read a JSON file; returns its content or None, and findings about the reading."""
    file = Path(path)
    if not file.is_file():
        advice = f"Correct data_root or {location.split} in the mixture entry."
        if file.as_posix().startswith("data/toy/"):
            advice = "Make the toy datasets here: damex toydata --out data/toy"
        text = f"the annotation file does not exist (seen from {Path.cwd()}). {advice}"
        return None, [location.finding("file-missing", None, text)]
    try:
        return json.loads(read_text(file)), []
    except DataError as error:
        text = f"it is not a JSON file: {error}"
        return None, [location.finding("not-json", None, text)]
    except ValueError as error:
        text = f"it is not a JSON file ({error}). Write it again."
        return None, [location.finding("not-json", None, text)]


def read_coco(path: Path, dataset: str) -> dict[str, Any]:
    """Load a COCO file with valid fields, ids and class names; boxes are not checked.

    DataError if the file is missing, is not JSON, or holds anything else.
    """
    location = Location(dataset, str(path))
    document, findings = read_json(path, location)
    raise_first(findings or parse_records(document, location)[1])
    return document


def read_class_names(path: Path, dataset: str) -> tuple[str, ...]:
    """Names of the categories of a COCO file, in file order, without empty headings.

    Only this list is parsed: the whole of a large file takes many seconds. DataError if
    the file is missing, is not JSON, or has no valid categories.
    """
    text, categories = "", None
    with contextlib.suppress(OSError, DataError):  # reported by read_coco
        text = read_text(path)
    keys = list(re.finditer(r'(?<!\\)"categories"\s*:\s*', text))
    if len(keys) == 1:  # otherwise one may be nested in another record
        with contextlib.suppress(json.JSONDecodeError):
            categories, _ = json.JSONDecoder().raw_decode(text, keys[0].end())
    if not isinstance(categories, list):
        categories = read_coco(path, dataset)["categories"]
    location = Location(dataset, str(path))
    categories, findings = readable_records(categories, "categories", location)
    raise_first(findings)

    def is_used(key: Any) -> bool:
        ways = {json.dumps(key), json.dumps(key, ensure_ascii=False)}
        ids = "|".join(map(re.escape, ways))
        if isinstance(key, (int, float)) and float(key).is_integer():
            ids = rf"{int(key)}(\.0+)?"
        return re.search(rf'"category_id"\s*:\s*({ids})(?![\w.])', text) is not None

    kept = _without_headings(categories, is_used)
    raise_first(_check_class_names(kept, location))
    return tuple(str(category["name"]) for category in kept)


def parse_records(
    document: Any, location: Location, classes: Collection[str] | None = None
) -> tuple[Records | None, list[Finding]]:
    """The readable records of a JSON document, and findings about fields and ids.

    Without ``images``, ``annotations`` or ``categories``, the records are None.
    """
    findings = [*_check_lists(document, location)]
    if findings:
        return None, findings
    rows: dict[str, list[dict[str, Any]]] = {}
    for key in LISTS:
        rows[key], problems = readable_records(document[key], key, location)
        findings += problems
    images, annotations, every = rows.values()
    used = {record["category_id"] for record in annotations}
    kept = _without_headings(every, used.__contains__)
    wanted = {*(classes or ())} - {_name(category) for category in kept}
    categories = [c for c in every if c in kept or _name(c) in wanted]
    findings += _check_class_names(categories, location)
    unknown = (math.nan, math.nan)
    sizes = [(image.get("width"), image.get("height")) for image in images]
    known = [pair if all(map(PIXELS.accepts, pair)) else unknown for pair in sizes]
    image_of = {image["id"]: i for i, image in enumerate(images)}
    names: dict[Any, str] = {}
    for category in categories:  # the first of each id
        names.setdefault(category["id"], _name(category))
    class_of = {key: i for i, key in enumerate(names)}
    classes_N = [class_of.get(row["category_id"], -1) for row in annotations]
    records = Records(
        location=location,
        images=images,
        annotations=annotations,
        categories=names,
        headings=tuple(_name(c) for c in every if c not in categories),
        size_M2=np.array(known, np.float64).reshape(-1, 2),
        image_N=np.array([image_of.get(r["image_id"], -1) for r in annotations], int),
        class_N=np.array(classes_N, int),
    )
    return records, findings


def _check_lists(document: Any, location: Location) -> Iterator[Finding]:
    if not isinstance(document, dict):
        text = (
            f"expected an object with the lists {', '.join(LISTS)}, got a "
            f"{type(document).__name__}. Is it a COCO file of a dataset?"
        )
        yield location.finding("wrong-type", None, text)
        return
    for key in LISTS:
        kind, text = "missing-list", "is missing; a COCO file has " + ", ".join(LISTS)
        if key in document:
            found = type(document[key]).__name__
            kind, text = "wrong-type", f"must hold records, got a {found}"
        if not isinstance(document.get(key), list):
            yield location.finding(kind, key, f"the list {key!r} {text}.")


def readable_records(
    rows: list[Any], key: str, location: Location
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Find the readable records of a list, and problems of their fields and ids."""
    is_sound, label = _are_sound(rows, key), LISTS[key]
    kept, findings = [*rows] if is_sound else [], []
    for position, row in enumerate(() if is_sound else rows):
        number = f"number {position + 1} of the list"
        if type(row) is not dict:
            text = f"expected an object with fields, got {row!r:.80}."
            findings.append(location.finding("wrong-type", f"{label} {number}", text))
            continue
        problems = {k: f for k, f in FIELDS[key].items() if not f.accepts(row.get(k))}
        if not any(field.is_link for field in problems.values()):
            kept.append(row)
        record = f"{label} {row['id'] if ID.accepts(row.get('id')) else number}"
        for name, field in problems.items():
            kind, text = "missing-field", f"{name!r} is missing; add it to the record."
            if (value := row.get(name)) is not None:
                kind = "wrong-type"
                text = f"{name} must be {field.words}, got {value!r:.80}."
            findings.append(location.finding(kind, record, text))
    ids = [found for row in kept if type(found := row.get("id")) in ID.types]
    for value, count in Counter(ids).items() if len({*ids}) < len(ids) else ():
        if count > 1:
            text = (
                f"{count} records of {key!r} have the id {value!r}, so that one would "
                "replace the other. Give every record its own id."
            )
            kind = f"duplicate-{label}-id"
            findings.append(location.finding(kind, f"{label} {value}", text))
    return kept, truncate_findings(findings)


def _are_sound(rows: list[Any], key: str) -> bool:
    """Whether all records are readable: column by column, as files may be large."""
    if not {*map(type, rows)} <= {dict}:
        return False
    for name, field in FIELDS[key].items():
        column = [row.get(name) for row in rows]
        if not {*map(type, column)} <= {*field.types}:
            return False
        if field.test is not None and not all(map(field.test, {*column})):
            return False
    return True


def _name(category: Mapping[str, Any]) -> str:
    name = category.get("name")
    return "" if name is None else str(name)


def _without_headings(
    categories: Sequence[Mapping[str, Any]], is_used: Callable[[Any], bool]
) -> list[Mapping[str, Any]]:
    """Leave out unused categories that are only a heading of the others.

    Roboflow's exports begin with one: category 0 has the name of the project and no
    boxes, and is the ``supercategory`` of all others. ``is_used`` is asked by id.
    """

    def is_heading(category: Mapping[str, Any]) -> bool:
        key, name = category["id"], category.get("name")
        others = [other for other in categories if other["id"] != key]
        below = any(other.get("supercategory") == name for other in others)
        return below and not is_used(key)

    return [category for category in categories if not is_heading(category)]


def _check_class_names(
    categories: Sequence[Mapping[str, Any]], location: Location
) -> Iterator[Finding]:
    """Names shared by two categories."""
    for name, count in Counter(filter(None, map(_name, categories))).items():
        if count > 1:
            text = f"{count} categories have this name. Give each class one category."
            yield location.finding("duplicate-class-name", f"class {name!r}", text)
