"""Formats that damex does not read, recognized to name them in messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from damex.files import glance
from damex.workbench.formats.tree import Tree, numbers

_LOOKED_AT = 10
_MAX_BYTES = 50_000_000  # of a JSON file that is parsed
# Keys of an object in JSON, and the tool or dataset that writes them.
_KEYS = (
    ({"shapes", "imagePath"}, "LabelMe"),
    ({"imgHeight", "imgWidth", "objects"}, "Cityscapes"),
    ({"size", "objects", "tags"}, "Supervisely"),
    ({"regions", "filename"}, "VGG Image Annotator"),
    ({"_via_img_metadata"}, "VGG Image Annotator"),
    ({"data_row"}, "Labelbox"),
    ({"asset", "regions"}, "VoTT"),
    ({"data", "annotations"}, "Label Studio"),
    ({"image", "label"}, "Label Studio"),
    ({"image", "annotations"}, "CreateML"),
    ({"name", "labels"}, "BDD100K"),
)
_SUFFIXES = {".tfrecord": "TFRecord", ".tfrecords": "TFRecord", ".ndjson": "NDJSON"}


def problem_of_unread(tree: Tree) -> str | None:
    """A sentence that names the format of a folder and what to do; None if unknown."""
    for path, name in _found(tree):
        return (
            f"{path} is in the format of {name}, which damex does not read. Convert "
            "it to COCO, Pascal VOC or YOLO, for instance with FiftyOne or Datumaro"
        )
    return None


def _found(tree: Tree) -> Iterable[tuple[str, str]]:
    """Files of formats that are not read, and the names of these."""
    for path in tree.with_suffix(".txt")[:_LOOKED_AT]:
        line = next(filter(None, tree.glanced(path, 4000)), "")
        if name := _name_of_line(line, is_whole_video=path.endswith("gt/gt.txt")):
            yield path, name
    for path in tree.with_suffix(".json")[:_LOOKED_AT]:
        if name := _name_of_json(tree, path):
            yield path, name
    for path in tree.with_suffix(".xml")[:_LOOKED_AT]:
        text = "".join(tree.glanced(path, 4000))
        if "<annotations" in text and ("<image " in text or "<meta>" in text):
            yield path, "CVAT (<annotations> with an <image> each)"
    for suffix, name in _SUFFIXES.items():
        for path in tree.with_suffix(suffix)[:1]:
            yield path, name
    masks = [path for path in tree.images if "segmentation" in path.lower()]
    if masks:
        yield masks[0], "masks (an image of class colours), without boxes"


def _name_of_line(line: str, *, is_whole_video: bool) -> str | None:
    words, fields = line.split(), [part.strip() for part in line.strip(",").split(",")]
    if len(words) in (17, 18) and numbers(words[:2]) and not numbers(words[2:3]):
        return "KITTI tracking (a file per video; frame and track come first)"
    if len(fields) >= 7 and numbers(fields):
        if len(fields) == 8 and not is_whole_video:
            return "VisDrone (x, y, width, height, score, class, truncation, occlusion)"
        if len(fields) in (7, 8, 9, 10):
            return "MOT (a file per video; frame and track come first)"
    corners = numbers(words[1:]) if len(words) == 5 else None
    if corners and not numbers(words[:1]) and max(corners) > 2:  # beyond YOLO's
        return "OIDv4 (class name, x1, y1, x2, y2)"
    return None


def _name_of_json(tree: Tree, path: str) -> str | None:
    if tree.files[path][0] > _MAX_BYTES:
        return None
    try:
        document = json.loads(glance(tree.raw(path)))
    except ValueError:
        return None
    for record in _records(document):
        for keys, name in _KEYS:
            if keys <= record.keys():
                return name
    return None


def _records(document: Any) -> Iterable[dict[str, Any]]:
    """The object itself, or the first one in a list or a mapping from names."""
    if isinstance(document, list):
        yield from (row for row in document[:1] if isinstance(row, dict))
    elif isinstance(document, dict) and "categories" not in document:
        yield document
        first = next(iter(document.values()), None)
        yield from [first] if isinstance(first, dict) else []
