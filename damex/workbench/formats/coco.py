"""COCO JSON, as laid out by the COCO dataset, Roboflow, CVAT and others.

Boxes are read, polygons are not. Files are checked as in training (``coco_records``),
but broken images and annotations are only left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from damex.datasets.coco_records import Records, parse_records, read_json
from damex.datasets.coco_schema import LISTS, flag_of, is_box, is_number
from damex.datasets.entries import Options, Summary
from damex.datasets.findings import Location, raise_first
from damex.errors import DataError
from damex.files import glance
from damex.workbench.formats.records import (
    Box,
    Contents,
    Format,
    Sample,
    drop_namesakes,
    is_set,
)
from damex.workbench.formats.tree import Tree, some, stem

_MANY_FILES = 40


def _files(tree: Tree) -> list[str]:
    """JSON files of detections; only ``instances_*`` among COCO's other tasks."""
    files = tree.with_suffix(".json")
    if len(files) > _MANY_FILES:  # one per image: not COCO
        top = max(files, key=lambda path: tree.files[path][0])
        files = [p for p in files if tree.split_of_file(p) or "coco" in p or p == top]
    keys = [f'"{key}"'.encode() for key in LISTS]
    texts = ((path, tree.raw(path)) for path in files)
    # UTF-16 has zeros.
    texts = ((p, glance(raw).encode() if 0 in raw[:4] else raw) for p, raw in texts)
    found = [path for path, text in texts if all(key in text for key in keys)]
    instances = [path for path in found if stem(path).startswith("instances_")]
    return instances or found


def _problem(tree: Tree) -> str | None:
    """Why the first JSON file that is nearly COCO is not."""
    for path in tree.with_suffix(".json")[:_MANY_FILES]:
        try:
            document = json.loads(tree.text(path))
        except DataError as error:
            return str(error).rstrip(".")
        except json.JSONDecodeError as error:
            return f"{path} is not a JSON file ({error})"
        first = document[0] if isinstance(document, list) and document else None
        if isinstance(first, dict) and "score" in first:
            return f"{path} is a list of detections, not ground truth: {first!r:.80}"
        known = document if isinstance(document, dict) else {}
        lacks = [key for key in LISTS if key not in known]
        if lacks and ("images" in known or "annotations" in known):
            return f"{path} has no list {lacks[0]!r}"
    return None


def _read(tree: Tree, options: Options, summary: Summary) -> Contents:
    files = _files(tree)
    contents = Contents([])
    names: dict[str, bool] = {}  # and whether it is a class, not a heading
    for path in files:
        document, records = _load(tree, path, options, summary)
        kept = records.categories.values()
        for category in document["categories"]:
            name = str(category["name"])
            names[name] = names.get(name, False) or name in kept
            if flag_of(category.get("predicted")):
                contents.predicted.add(name)
        samples = list(_samples(tree, path, records, summary))
        contents.samples += samples
        if (split := tree.split_of_table(path, files)) is not None:
            contents.splits[split] = samples
    drop_namesakes(tree, contents, summary)
    for name in names:
        if not names[name]:
            what = f"category {name!r} left out: no box uses it, it heads others"
            summary.note(what, files[0])
    contents.classes = tuple(name for name in names if names[name])
    return contents


def _load(
    tree: Tree, path: str, options: Options, summary: Summary
) -> tuple[dict[str, Any], Records]:
    """A document and its readable records; DataError if its categories are faulty."""
    place = Location("", str(tree.root / path))
    document, findings = read_json(tree.root / path, place)
    raise_first(findings)
    records, findings = parse_records(document, place, options.classes)
    raise_first(
        finding
        for finding in findings
        if records is None or (finding.record or "").startswith(("category", "class"))
    )
    assert records is not None
    known = {*map(id, [*records.images, *records.annotations])}
    for key in ("images", "annotations"):
        for record in [row for row in document[key] if id(row) not in known]:
            what = f"records of {key!r} that are not objects with valid ids"
            summary.drop(what, f"{path}: {record!r:.80}")
    return document, records


def _samples(
    tree: Tree, path: str, records: Records, summary: Summary
) -> Iterator[Sample]:
    boxes: dict[Any, list[Box]] = {}
    for record in records.annotations:
        box = _box(record, records.categories, path, summary)
        boxes.setdefault(record["image_id"], []).extend([box] if box else [])
    names = [str(record.get("file_name") or "") for record in records.images]
    find = tree.image_finder(path, names)
    files: dict[Any, set[str]] = {}
    for record, name in zip(records.images, names, strict=True):
        files.setdefault(record["id"], set()).add(name)
    listed = set()
    for record, name, size in zip(records.images, names, records.size_M2, strict=True):
        number = record["id"]
        place = f"{path}: image {number!r}"
        if number in listed:
            summary.drop("image records with the id of another", place)
            continue
        listed.add(number)
        if len(files[number]) > 1:  # whose are the boxes?
            place = f"{place}: {some(sorted(files[number]))}"
            summary.drop("image ids of several files, all left out", place)
            summary.drop("boxes of these ids", place, len(boxes.get(number, ())))
            continue
        if (image := find(name)) is None:
            summary.drop(
                "annotated images that are missing or ambiguous", f"{place}: {name}"
            )
            lost = len(boxes.get(number, ()))
            summary.drop("boxes of images that are missing or ambiguous", place, lost)
            continue
        width, height = map(round, np.nan_to_num(size).tolist())
        stated = (width, height) if width and height else None
        yield Sample(image, path, boxes.get(number, []), stated)
    for number, left in boxes.items():
        if number not in listed:
            what = "boxes of images that the file does not list"
            hint = _hint(number, listed)
            summary.drop(what, f"{path}: image_id {number!r}{hint}", len(left))


def _box(
    record: Mapping[str, Any], names: Mapping[Any, str], path: str, summary: Summary
) -> Box | None:
    place = f"annotation {record.get('id')!r}"
    where, bbox = f"{path}: {place}", record.get("bbox")
    if record["category_id"] not in names:
        what = "boxes of an unknown category id"
        hint = _hint(record["category_id"], names)
        summary.drop(what, f"{where}: {record['category_id']!r}{hint}")
        return None
    if not is_box(bbox):
        what = "annotations without a bbox of four numbers"
        summary.drop(what, f"{where}: bbox is {bbox!r:.80}")
        return None
    if is_set(record.get("ignore"), "ignore", where, summary):
        summary.drop("boxes marked 'ignore'", where)
        return None
    x, y, w, h = map(float, record["bbox"])
    if crowd := is_set(record.get("iscrowd"), "iscrowd", where, summary):
        summary.note("boxes marked iscrowd: kept as crowd", where)
    area = record.get("area", 0)
    stated = float(area) if is_number(area) and 0 < area < math.inf else None
    name, score = names[record["category_id"]], record.get("score")
    found = None
    if flag_of(record.get("predicted")) and isinstance(score, float | int):
        found = float(score)
    return Box((x, y, x + w, y + h), name, place, crowd, stated, found)


def _hint(key: Any, listed: Iterable[Any]) -> str:
    """Why an id is not listed that looks as if it were."""
    same = next((one for one in listed if str(one) == str(key)), None)
    if same is None:
        return ""
    return f", but {same!r}: a number and a text are different ids, write both alike"


COCO = Format(
    name="coco",
    looks_for="a .json with images, annotations and categories",
    recognise=lambda tree: some(_files(tree)) or None,
    read=_read,
    problem=_problem,
)
