"""COCO json, as the COCO data set, Roboflow, CVAT and others lay it out.

Boxes are read, polygons are not. Nothing of a record is trusted: ids may be used twice,
sizes may be wrong, a category may be only the name of the data set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from damex.datasets.formats.categories import without_dummies
from damex.datasets.formats.records import (
    Box,
    Contents,
    Format,
    Ledger,
    Options,
    Sample,
)
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
    """JSON files of detections; ``instances_*`` alone where COCO's other tasks lie."""
    files = tree.with_suffix(".json")
    if len(files) > _MANY_FILES:  # one per image: none of them is COCO's
        files = [path for path in files if split_of_file(path) or "coco" in path]
    found = [path for path in files if _looks_like_coco(tree, path)]
    instances = [path for path in found if stem(path).startswith("instances_")]
    return instances or found


def _looks_like_coco(tree: Tree, path: str) -> bool:
    content = (tree.root / path).read_bytes()
    return all(f'"{key}"'.encode() in content for key in _LISTS)


def _recognise(tree: Tree) -> str | None:
    return some(_files(tree)) or None


def _read(tree: Tree, options: Options, ledger: Ledger) -> Contents:
    files = _files(tree)
    by_split: dict[str, list[str]] = {}
    for path in files:
        by_split.setdefault(split_of_file(path) or "", []).append(path)
    contents = Contents([])
    categories: list[Mapping[str, Any]] = []
    used: set[str] = set()
    for path in files:
        document = _load(tree, path)
        categories += document["categories"]
        samples = list(_samples(tree, path, document, ledger))
        used.update(box.label for sample in samples for box in sample.boxes)
        contents.samples += samples
        split = split_of_file(path)
        if len(files) > 1 or split is not None:
            # Two files of one split, such as train2014 and train2017, overlap.
            alone = split is not None and len(by_split[split]) == 1
            contents.splits[split if alone and split else path] = samples
    kept = without_dummies(categories, used | set(options.classes or ()))
    names = dict.fromkeys(str(category["name"]) for category in categories)
    left = dict.fromkeys(str(category["name"]) for category in kept)
    for name in names.keys() - left.keys():
        what = f"category {name!r} left out: no box uses it, others stand below it"
        ledger.note(what, files[0])
    contents.classes = tuple(left)
    return contents


def _load(tree: Tree, path: str) -> dict[str, Any]:
    try:
        document = json.loads(tree.text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{tree.root / path} is not a JSON file ({error}).") from error
    for key in _LISTS:
        records = document.get(key) if isinstance(document, dict) else None
        if not isinstance(records, list):
            raise DataError(f"{tree.root / path} has no list {key!r}; COCO files have.")
    for category in document["categories"]:
        if not isinstance(category, dict) or not {"id", "name"} <= category.keys():
            raise DataError(
                f"{tree.root / path}: a category has no 'id' or 'name': {category!r}."
            )
    return document


def _samples(
    tree: Tree, path: str, document: Mapping[str, Any], ledger: Ledger
) -> Iterator[Sample]:
    names = {
        category["id"]: str(category["name"]) for category in document["categories"]
    }
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
        yield Sample(image, path, boxes.get(record["id"], []), _size(record))
    for image_id in boxes.keys() - listed:
        where = f"{path}: image_id {image_id!r}"
        lost = len(boxes[image_id])
        ledger.drop("boxes of images that the file does not list", where, lost)


def _image_folders(path: str) -> list[str]:
    """Folders in which the images of an annotation file may lie, likely ones first."""
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


def _size(record: Mapping[str, Any]) -> tuple[int, int] | None:
    values = (record.get("width"), record.get("height"))
    if all(isinstance(value, (int, float)) and value > 0 for value in values):
        return round(float(values[0] or 0)), round(float(values[1] or 0))
    return None


def _box(
    record: Mapping[str, Any], names: Mapping[Any, str], path: str, ledger: Ledger
) -> Box | None:
    where = f"{path}: annotation {record.get('id')!r}"
    bbox, category = record.get("bbox"), record.get("category_id")
    if category not in names:
        ledger.drop("boxes of an unknown category id", f"{where}: {category!r}")
        return None
    if (
        not isinstance(bbox, list)
        or len(bbox) != 4
        or not all(isinstance(value, (int, float)) for value in bbox)
    ):
        ledger.drop("annotations without a bbox of four numbers", where)
        return None
    if record.get("ignore"):
        ledger.drop("boxes marked 'ignore'", where)
        return None
    x, y, w, h = (float(value) for value in bbox)
    area, crowd = record.get("area"), bool(record.get("iscrowd"))
    if crowd:
        ledger.note("boxes marked iscrowd: kept as crowd", where)
    stated = float(area) if isinstance(area, (int, float)) and area > 0 else None
    place = f"annotation {record.get('id')!r}"
    return Box((x, y, x + w, y + h), names[category], place, crowd, stated)


COCO = Format(
    name="coco",
    looks_for="a .json with images, annotations and categories",
    recognise=_recognise,
    read=_read,
)
