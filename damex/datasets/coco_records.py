"""COCO documents as columns, and findings about their fields, ids and classes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from damex.datasets.findings import MAX_LISTED, Finding, Place, capped
from damex.errors import ConfigError

BAD_BOX_POLICIES = ("error", "drop")
LISTS = ("images", "annotations", "categories")
_SINGULAR = {"images": "image", "annotations": "annotation", "categories": "category"}


class _Field(NamedTuple):
    """Allowed types and values of a field."""

    types: frozenset[type]
    words: str
    test: Callable[[Any], bool] | None = None

    def accepts(self, value: Any) -> bool:
        return type(value) in self.types and (self.test is None or self.test(value))


_ID = _Field(frozenset({int, str, float}), "an integer or a text")
_PATH = _Field(frozenset({str}), "a path", bool)
_NAME = _Field(frozenset({int, str}), "a text", lambda value: value != "")
_PIXELS = _Field(
    frozenset({int, float}),
    "a number of pixels above 0",
    lambda value: 0 < value < math.inf,
)
_FIELDS: Mapping[str, Mapping[str, _Field]] = MappingProxyType(
    {
        "images": dict(id=_ID, file_name=_PATH, width=_PIXELS, height=_PIXELS),
        "annotations": dict(image_id=_ID, category_id=_ID, id=_ID),
        "categories": dict(id=_ID, name=_NAME),
    }
)
# Records with a fault in one of these are skipped in all further checks.
_LINKS = MappingProxyType(
    {
        "images": ("id",),
        "annotations": ("image_id", "category_id"),
        "categories": ("id",),
    }
)


@dataclass(frozen=True)
class Expectations:
    """What a config expects of the data; defaults are those of ``MixtureDataset``.

    Args:
        classes: Names of the used classes; None for all.
        is_choice: Whether the mixture entry names them.
        filter_empty: Whether training leaves out images without boxes.
        scales: Sizes that images may be resized to.
        kept_scales: Those of them for whole images with their aspect ratio kept.
        num_queries: Number of objects that the detector can find in an image.
        applies_exif: Whether images are rotated by their EXIF orientation.
    """

    classes: tuple[str, ...] | None = None
    is_choice: bool = False
    on_bad_box: str = "error"
    filter_empty: bool = True
    scales: tuple[tuple[float, float], ...] = ()
    kept_scales: tuple[tuple[float, float], ...] = ()
    num_queries: int | None = None
    applies_exif: bool = True

    def __post_init__(self) -> None:
        if self.on_bad_box not in BAD_BOX_POLICIES:
            raise ConfigError(
                f"on_bad_box must be one of {BAD_BOX_POLICIES}, got "
                f"{self.on_bad_box!r}."
            )

    def uses(self, name: str) -> bool:
        """Whether training uses the class."""
        return self.classes is None or name in self.classes


@dataclass(frozen=True)
class Records:
    """The readable records of a document: M images, N annotations.

    Args:
        categories: Id -> name; empty if the record has none.
        headings: Names of categories that are only a heading of others.
        size_M2: Width and height in pixels; NaN if unknown.
        image_N: Position of each annotation's image; -1 if it is not listed.
    """

    place: Place
    images: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    categories: dict[Any, str]
    headings: tuple[str, ...]
    size_M2: np.ndarray
    image_N: np.ndarray

    def each(
        self,
        kind: str,
        key: str,
        positions: Sequence[int] | np.ndarray,
        text: str | Callable[[int], str],
        *,
        level: str | None = None,
    ) -> Iterator[Finding]:
        """A finding for each record of list ``key``; one for all beyond ``MAX_LISTED``.

        ``text`` is the message or a function of the position.
        """
        for position in map(int, positions[:MAX_LISTED]):
            record, owner, file = self._names(key, position)
            words = text if isinstance(text, str) else text(position)
            yield self.place.finding(
                kind, record, words, owner=owner, level=level, file=file
            )
        rest = len(positions) - MAX_LISTED
        if rest > 0:
            words = f"{rest} more records like the {MAX_LISTED} that are listed."
            yield self.place.finding(kind, None, words, level=level, count=rest)

    def image_name(self, position: int) -> str:
        """The id of an image, or its path in a converted folder."""
        image = self.images[position]
        return f"image {image.get('file_name') if self.place.root else image['id']}"

    def annotation_name(self, position: int) -> str:
        """The id of an annotation, or its place in the converted file."""
        record = self.annotations[position]
        if self.place.root and (place := record.get("place")) is not None:
            return f"line {place}" if isinstance(place, int) else str(place)
        return f"annotation {record.get('id')}"

    def _names(self, key: str, position: int) -> tuple[str, str, str | None]:
        """Record, its owner, and its file unless that is the annotation file."""
        if key == "images":
            return self.image_name(position), "", self._file(position)
        image = int(self.image_N[position])
        if image < 0:
            return self.annotation_name(position), "", None
        owner = f"image {self.images[image].get('file_name')!r}"
        return self.annotation_name(position), owner, self._file(image)

    def _file(self, image: int) -> str | None:
        """The annotation file of an image in a converted folder."""
        source = self.images[image].get("source")
        return f"{self.place.root}/{source}" if self.place.root and source else None


def read_json(path: str | Path, place: Place) -> tuple[Any, list[Finding]]:
    """Read a JSON file; returns its content or None, and findings about the reading."""
    file = Path(path)
    if not file.is_file():
        advice = f"Correct data_root or {place.split} in the mixture entry."
        if file.as_posix().startswith("data/toy/"):
            advice = (
                "Make the toy datasets here: python -m damex.toydata --out data/toy"
            )
        text = f"there is no such annotation file (seen from {Path.cwd()}). {advice}"
        return None, [place.finding("file-missing", None, text)]
    try:
        return json.loads(file.read_text(encoding="utf-8-sig")), []
    except ValueError as error:  # not JSON, or not text
        text = f"it is not a JSON file ({error}). Write it again."
        return None, [place.finding("not-json", None, text)]


def parse_records(
    document: Any, place: Place, classes: Collection[str] | None = None
) -> tuple[Records | None, list[Finding]]:
    """The readable records of a JSON document, and findings about fields and ids.

    Without ``images``, ``annotations`` or ``categories``, the records are None.
    """
    findings = [*_check_lists(document, place)]
    if findings:
        return None, findings
    rows: dict[str, list[dict[str, Any]]] = {}
    for key in LISTS:
        rows[key], faults = readable_records(document[key], key, place)
        findings += faults
    categories = without_headings(rows["categories"], rows["annotations"], classes)
    findings += check_class_names(categories, place)
    images, annotations = rows["images"], rows["annotations"]
    sizes = [(image.get("width"), image.get("height")) for image in images]
    unknown = (math.nan, math.nan)
    known = [pair if all(map(_PIXELS.accepts, pair)) else unknown for pair in sizes]
    position_of = {image["id"]: i for i, image in enumerate(images)}
    ids = (record["image_id"] for record in annotations)
    names: dict[Any, str] = {}
    for category in categories:  # the first of each id
        names.setdefault(category["id"], _text(category.get("name")))
    left = [c for c in rows["categories"] if c not in categories]
    records = Records(
        place=place,
        images=images,
        annotations=annotations,
        categories=names,
        headings=tuple(_text(category.get("name")) for category in left),
        size_M2=np.array(known, np.float64).reshape(-1, 2),
        image_N=np.fromiter(
            map(position_of.get, ids, repeat(-1)), np.int64, len(annotations)
        ),
    )
    return records, findings


def _check_lists(document: Any, place: Place) -> Iterator[Finding]:
    if not isinstance(document, dict):
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


def readable_records(
    rows: list[Any], key: str, place: Place
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Find the readable records of a list, and faults of their fields and ids."""
    faults = [(i, "", row) for i, row in enumerate(rows) if type(row) is not dict]
    lost = {position for position, _, _ in faults}
    dicts = [i for i in range(len(rows)) if i not in lost] if lost else range(len(rows))
    for name, field in _FIELDS[key].items():
        column = [rows[i].get(name) for i in dicts]
        if {*map(type, column)} <= field.types and (
            field.test is None or all(map(field.test, column))
        ):
            continue
        pairs = zip(dicts, column, strict=True)
        bad = [(i, name, value) for i, value in pairs if not field.accepts(value)]
        faults += bad
        if name in _LINKS[key]:
            lost |= {position for position, _, _ in bad}
    findings = []
    for position, name, value in sorted(faults, key=lambda fault: fault[0]):
        row = rows[position]
        known = isinstance(row, dict) and _ID.accepts(row.get("id"))
        label = row["id"] if known else f"number {position + 1} of the list"
        kind = "missing-field" if name and value is None else "wrong-type"
        text = f"there is no {name!r}; add it to the record."
        if not name:
            text = f"expected an object with fields, got {value!r:.80}."
        elif value is not None:
            text = f"{name} must be {_FIELDS[key][name].words}, got {value!r:.80}."
        findings.append(place.finding(kind, f"{_SINGULAR[key]} {label}", text))
    kept = [row for i, row in enumerate(rows) if i not in lost] if lost else rows
    return kept, capped([*findings, *_check_ids(kept, key, place)])


def _check_ids(rows: list[dict[str, Any]], key: str, place: Place) -> Iterator[Finding]:
    ids = [found for row in rows if type(found := row.get("id")) in _ID.types]
    if len(set(ids)) == len(ids):
        return
    name = _SINGULAR[key]
    for value, count in Counter(ids).items():
        if count > 1:
            text = (
                f"{count} records of {key!r} have the id {value!r}, so that one would "
                "replace the other. Give every record its own id."
            )
            yield place.finding(f"duplicate-{name}-id", f"{name} {value}", text)


def _text(name: Any) -> str:
    return "" if name is None else str(name)


def without_dummies(
    categories: Sequence[Mapping[str, Any]], used: Collection[Any], key: str = "name"
) -> list[Mapping[str, Any]]:
    """Leave out categories that are only a heading of the others.

    Roboflow's exports begin with one: category 0 has the name of the project and no
    boxes, and is the ``supercategory`` of all others. Categories in ``used`` (by
    ``key``, ``name`` or ``id``) and other unused ones stay.
    """

    def is_dummy(category: Mapping[str, Any]) -> bool:
        name = category.get("name")
        return category.get(key) not in used and any(
            other.get("supercategory") == name and other.get(key) != category.get(key)
            for other in categories
        )

    return [category for category in categories if not is_dummy(category)]


def without_headings(
    categories: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    classes: Collection[str] | None,
) -> list[Mapping[str, Any]]:
    """Leave out headings without boxes, unless only they have the name of a class."""
    used = {record["category_id"] for record in annotations}
    kept = without_dummies(categories, used, key="id")
    wanted = {*(classes or ())} - {_text(category.get("name")) for category in kept}
    return [c for c in categories if c in kept or _text(c.get("name")) in wanted]


def check_class_names(
    categories: Sequence[Mapping[str, Any]], place: Place
) -> Iterator[Finding]:
    """Names shared by two categories."""
    names = [_text(category.get("name")) for category in categories]
    for name, count in Counter(filter(None, names)).items():
        if count > 1:
            text = f"{count} categories have this name. Give each class one category."
            yield place.finding("duplicate-class-name", f"class {name!r}", text)
