"""COCO JSON, as laid out by the COCO dataset, Roboflow, CVAT and others.

Boxes are read, polygons are not. Records are not trusted: ids may repeat, sizes may be
wrong, a category may be only the name of the dataset.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from damex.datasets.coco_records import without_dummies
from damex.datasets.formats.records import (
    Box,
    Contents,
    Format,
    Ledger,
    Options,
    Sample,
    fault_of_names,
    size_of,
)
from damex.datasets.formats.splits import split_of_table
from damex.datasets.formats.tree import (
    Tree,
    parent,
    some,
    split_name,
    split_of_file,
    stem,
)
from damex.errors import DataError

_LISTS = ("images", "annotations", "categories")
_MANY_FILES = 40


def _files(tree: Tree) -> list[str]:
    """JSON files of detections; only ``instances_*`` among COCO's other tasks."""
    files = tree.with_suffix(".json")
    if len(files) > _MANY_FILES:  # one per image: not COCO
        files = [path for path in files if split_of_file(path) or "coco" in path]
    keys = [f'"{key}"' for key in _LISTS]
    found = [path for path in files if tree.holds(path, *keys)]
    instances = [path for path in found if stem(path).startswith("instances_")]
    return instances or found


def _fault(tree: Tree) -> str | None:
    """Why the first JSON file that is nearly COCO is not."""
    for path in tree.with_suffix(".json")[:_MANY_FILES]:
        try:
            document = json.loads(tree.text(path))
        except json.JSONDecodeError as error:
            return f"{path} is not a JSON file ({error})"
        first = document[0] if isinstance(document, list) and document else None
        if isinstance(first, dict) and "score" in first:
            return f"{path} is a list of detections, not ground truth: {first!r:.80}"
        known = document if isinstance(document, dict) else {}
        lacks = [key for key in _LISTS if key not in known]
        if 0 < len(lacks) < len(_LISTS):
            return f"{path} has no list {lacks[0]!r}"
    return None


def _recognise(tree: Tree) -> str | None:
    return some(_files(tree)) or None


def _read(tree: Tree, options: Options, ledger: Ledger) -> Contents:
    files = _files(tree)
    contents = Contents([])
    categories: list[Mapping[str, Any]] = []
    used: set[str] = set()
    for path in files:
        document = _load(tree, path, ledger)
        categories += document["categories"]
        samples = list(_samples(tree, path, document, ledger))
        used.update(box.label for sample in samples for box in sample.boxes)
        contents.samples += samples
        if (split := split_of_table(path, files)) is not None:
            contents.splits[split] = samples
    kept = without_dummies(categories, used | set(options.classes or ()))
    names = dict.fromkeys(category["name"] for category in categories)
    left = dict.fromkeys(category["name"] for category in kept)
    for name in names.keys() - left.keys():
        what = f"category {name!r} left out: no box uses it, others stand below it"
        ledger.note(what, files[0])
    contents.classes = tuple(left)
    return contents


def _load(tree: Tree, path: str, ledger: Ledger) -> dict[str, Any]:
    """The document of a file, without unreadable records."""
    file = tree.root / path
    try:
        document = json.loads(tree.text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not a JSON file ({error}).") from error
    for key in _LISTS:
        records = document.get(key) if isinstance(document, dict) else None
        if not isinstance(records, list):
            raise DataError(f"{file} has no list {key!r}; COCO files have.")
        document[key] = [record for record in records if _is_record(record)]
        broken = next((one for one in records if not _is_record(one)), None)
        what = f"records of {key!r} that are no objects, or have a list for an id"
        lost = len(records) - len(document[key])
        ledger.drop(what, f"{path}: {broken!r:.80}", lost)
    names: dict[Any, str] = {}
    for category in document["categories"]:
        if not {"id", "name"} <= category.keys():
            raise DataError(f"{file}: a category has no 'id' or 'name': {category!r}.")
        category["name"] = name = str(category["name"])
        if names.setdefault(category["id"], name) != name:
            raise DataError(
                f"{file}: the categories {names[category['id']]!r} and {name!r} have "
                f"one id, {category['id']!r}; give each its own."
            )
    used = {record.get("category_id") for record in document["annotations"]}
    kept = without_dummies(document["categories"], used, key="id")
    fault = fault_of_names([category["name"] for category in kept], "category")
    if fault is not None:
        raise DataError(f"{file}: {fault}. Give each category a name of its own.")
    return document


def _is_record(record: Any) -> bool:
    return isinstance(record, dict) and all(
        isinstance(record.get(key), (int, float, str, type(None)))
        for key in ("id", "image_id", "category_id")
    )


def _samples(
    tree: Tree, path: str, document: Mapping[str, Any], ledger: Ledger
) -> Iterator[Sample]:
    names = {category["id"]: category["name"] for category in document["categories"]}
    boxes: dict[Any, list[Box]] = {}
    for record in document["annotations"]:
        image_id = record.get("image_id")
        box = _box(record, names, path, ledger)
        boxes.setdefault(image_id, []).extend([] if box is None else [box])
    near = _image_folders(path)
    listed = set()
    for record in document["images"]:
        place = f"{path}: image {record.get('id')!r}"
        if "id" not in record or record["id"] in listed:
            ledger.drop("image records without an id of their own", place)
            continue
        listed.add(record["id"])
        name = str(record.get("file_name") or "")
        image = tree.locate_image(name, near, split_of_file(path)) if name else None
        if image is None:
            ledger.drop("annotated images that are not there", f"{place}: {name}")
            lost = len(boxes.get(record["id"], ()))
            ledger.drop("boxes of images that are not there", place, lost)
            continue
        sides = record.get("width"), record.get("height")
        stated = size_of(sides if all(map(_is_number, sides)) else None)
        yield Sample(image, path, boxes.get(record["id"], []), stated)
    for image_id in boxes.keys() - listed:
        where = f"{path}: image_id {image_id!r}"
        lost = len(boxes[image_id])
        ledger.drop("boxes of images that the file does not list", where, lost)


def _image_folders(path: str) -> list[str]:
    """Candidate image folders of an annotation file, likely ones first."""
    folder, split = parent(path), split_of_file(path)
    above = parent(folder)
    words = [word for word in stem(path).replace(".", "_").split("_") if word]
    named = [word for word in words if split_name(word)]
    likely = [*named, *([split] if split else []), ""]
    bases = [folder] if not folder else [folder, above]
    return [
        "/".join(part for part in (base, images, name) if part)
        for name in likely
        for base in bases
        for images in ("", "images")
    ]


def _box(
    record: Mapping[str, Any], names: Mapping[Any, str], path: str, ledger: Ledger
) -> Box | None:
    where = f"{path}: annotation {record.get('id')!r}"
    bbox, category = record.get("bbox"), record.get("category_id")
    if category not in names:
        ledger.drop("boxes of an unknown category id", f"{where}: {category!r}")
        return None
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(map(_is_number, bbox)):
        what = "annotations without a bbox of four numbers"
        ledger.drop(what, f"{where}: bbox is {bbox!r:.80}")
        return None
    if record.get("ignore"):
        ledger.drop("boxes marked 'ignore'", where)
        return None
    x, y, w, h = (float(value) for value in bbox)
    area, crowd = record.get("area"), bool(record.get("iscrowd"))
    if crowd:
        ledger.note("boxes marked iscrowd: kept as crowd", where)
    stated = float(area) if _is_number(area) and 0 < area < math.inf else None
    place = f"annotation {record.get('id')!r}"
    return Box((x, y, x + w, y + h), names[category], place, crowd, stated)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float))


COCO = Format(
    name="coco",
    looks_for="a .json with images, annotations and categories",
    recognise=_recognise,
    read=_read,
    fault=_fault,
)
