"""COCO documents: reading them, and their records as columns with faults of fields."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from damex.datasets.findings import (
    MAX_LISTED,
    OF_IMAGES,
    TEXTS,
    Finding,
    Place,
    capped,
    raise_first,
)
from damex.errors import ConfigError

BAD_BOX_POLICIES = ("error", "drop")
NUMBERS = frozenset({int, float})
# The lists of a document, and what one of their records is called.
LISTS: Mapping[str, str] = MappingProxyType(
    {"images": "image", "annotations": "annotation", "categories": "category"}
)


class _Field(NamedTuple):
    """Types and values of a field; a record with a faulty link is not read."""

    types: tuple[type, ...]
    words: str
    test: Callable[[Any], bool] | None = None
    is_link: bool = False

    def accepts(self, value: Any) -> bool:
        return type(value) in self.types and (self.test is None or self.test(value))


_ID = _Field((int, str, float), "an integer or a text")
_LINK = _ID._replace(is_link=True)
_PATH = _Field((str,), "a path", bool)
_NAME = _Field((int, str), "a text", lambda value: value != "")
_PIXELS = _Field(
    (int, float), "a number of pixels above 0", lambda value: 0 < value < math.inf
)
_FIELDS: Mapping[str, Mapping[str, _Field]] = MappingProxyType(
    {
        "images": dict(id=_LINK, file_name=_PATH, width=_PIXELS, height=_PIXELS),
        "annotations": dict(image_id=_LINK, category_id=_LINK, id=_ID),
        "categories": dict(id=_LINK, name=_NAME),
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
        positions: Sequence[int] | np.ndarray,
        level: str | None = None,
        **values: Any,
    ) -> Iterator[Finding]:
        """A finding for each annotation or image; one for all beyond ``MAX_LISTED``.

        The message in ``TEXTS`` is formatted with ``record``, ``size`` (of the image)
        and ``values``, which may be functions of the position.
        """
        of_image = kind in OF_IMAGES
        name = self.image_name if of_image else self.annotation_name
        for position in map(int, positions[:MAX_LISTED]):
            image = position if of_image else int(self.image_N[position])
            listed = self.images[image] if image >= 0 else {}
            size = self.size_M2[image] if image >= 0 else (math.nan, math.nan)
            known = {k: v(position) if callable(v) else v for k, v in values.items()}
            known["record"] = (self.images if of_image else self.annotations)[position]
            known["size"] = f"{size[0]:g} x {size[1]:g} px"
            has_owner = listed and not of_image
            source = listed.get("source") if self.place.root else None
            yield self.place.finding(
                kind,
                name(position),
                TEXTS[kind].format(**known),
                owner=f"image {listed.get('file_name')!r}" if has_owner else "",
                level=level,
                file=f"{self.place.root}/{source}" if source else None,
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


def read_json(path: str | Path, place: Place) -> tuple[Any, list[Finding]]:
    """Read a JSON file; returns its content or None, and findings about the reading."""
    file = Path(path)
    if not file.is_file():
        advice = f"Correct data_root or {place.split} in the mixture entry."
        if file.as_posix().startswith("data/toy/"):
            advice = (
                "Make the toy datasets here: python -m damex.toydata --out data/toy"
            )
        text = f"the annotation file does not exist (seen from {Path.cwd()}). {advice}"
        return None, [place.finding("file-missing", None, text)]
    try:
        return json.loads(file.read_text(encoding="utf-8-sig")), []
    except ValueError as error:  # not JSON, or not text
        text = f"it is not a JSON file ({error}). Write it again."
        return None, [place.finding("not-json", None, text)]


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
    images, annotations, every = rows.values()
    categories = _without_headings(every, annotations, classes)
    findings += check_class_names(categories, place)
    unknown = (math.nan, math.nan)
    sizes = [(image.get("width"), image.get("height")) for image in images]
    known = [pair if all(map(_PIXELS.accepts, pair)) else unknown for pair in sizes]
    position_of = {image["id"]: i for i, image in enumerate(images)}
    positions = [position_of.get(record["image_id"], -1) for record in annotations]
    names: dict[Any, str] = {}
    for category in categories:  # the first of each id
        names.setdefault(category["id"], _name(category))
    records = Records(
        place=place,
        images=images,
        annotations=annotations,
        categories=names,
        headings=tuple(_name(c) for c in every if c not in categories),
        size_M2=np.array(known, np.float64).reshape(-1, 2),
        image_N=np.array(positions, np.int64),
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
            text = f"the list {key!r} is missing; a COCO file has {', '.join(LISTS)}."
            yield place.finding("missing-list", key, text)
        elif not isinstance(document[key], list):
            found = type(document[key]).__name__
            text = f"expected a list of records in {key!r}, got a {found}."
            yield place.finding("wrong-type", key, text)


def readable_records(
    rows: list[Any], key: str, place: Place
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Find the readable records of a list, and faults of their fields and ids."""
    kept, findings = [], []
    fields = _FIELDS[key]
    tests = [(name, field.accepts) for name, field in fields.items()]
    for position, row in enumerate(rows):
        if type(row) is not dict:
            text = f"expected an object with fields, got {row!r:.80}."
            record = f"{LISTS[key]} number {position + 1} of the list"
            findings.append(place.finding("wrong-type", record, text))
            continue
        faults = [name for name, accepts in tests if not accepts(row.get(name))]
        if not faults or not any(fields[name].is_link for name in faults):
            kept.append(row)
        for name in faults:
            known = _ID.accepts(row.get("id"))
            label = row["id"] if known else f"number {position + 1} of the list"
            kind, text = "missing-field", f"{name!r} is missing; add it to the record."
            if (value := row.get(name)) is not None:
                kind = "wrong-type"
                text = f"{name} must be {fields[name].words}, got {value!r:.80}."
            findings.append(place.finding(kind, f"{LISTS[key]} {label}", text))
    ids = Counter(found for row in kept if _ID.accepts(found := row.get("id")))
    for value, count in ids.items() if len(ids) < len(kept) else ():
        if count > 1:
            text = (
                f"{count} records of {key!r} have the id {value!r}, so that one would "
                "replace the other. Give every record its own id."
            )
            kind = f"duplicate-{LISTS[key]}-id"
            findings.append(place.finding(kind, f"{LISTS[key]} {value}", text))
    return kept, capped(findings)


def is_box(box: Any) -> bool:
    """Whether a JSON value is a list of four numbers."""
    return isinstance(box, list) and len(box) == 4 and {*map(type, box)} <= NUMBERS


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number, including NaN and infinity."""
    return type(value) in NUMBERS


def _name(category: Mapping[str, Any]) -> str:
    name = category.get("name")
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


def _without_headings(
    categories: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    classes: Collection[str] | None,
) -> list[Mapping[str, Any]]:
    """Leave out headings without boxes, unless only they have the name of a class."""
    used = {record["category_id"] for record in annotations}
    kept = without_dummies(categories, used, key="id")
    wanted = {*(classes or ())} - {_name(category) for category in kept}
    return [c for c in categories if c in kept or _name(c) in wanted]


def check_class_names(
    categories: Sequence[Mapping[str, Any]], place: Place
) -> Iterator[Finding]:
    """Names shared by two categories."""
    for name, count in Counter(filter(None, map(_name, categories))).items():
        if count > 1:
            text = f"{count} categories have this name. Give each class one category."
            yield place.finding("duplicate-class-name", f"class {name!r}", text)
