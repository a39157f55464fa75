"""Folders with one text file of labels per image: KITTI, DOTA, and YOLO's files.

The format is recognized by the lines; the image is found by the name of the file.
YOLO's names and splits are in other files, read by ``yolo.py``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from damex.datasets.formats.records import (
    Box,
    Contents,
    Format,
    Ledger,
    Options,
    Sample,
    numbers,
)
from damex.datasets.formats.splits import splits_by_folder, splits_by_image_sets
from damex.datasets.formats.tree import (
    Tree,
    parent,
    replace_part,
    split_of_folder,
    stem,
)
from damex.errors import DataError

# Folder of labels -> sibling folders of images.
_IMAGE_FOLDERS = {
    "labels": ("images", "image", "JPEGImages", "img", ""),
    "label": ("images", "image", "img", ""),
    "label_2": ("image_2",),
    "annotations": ("images", "image", "JPEGImages", ""),
}
_LOOKED_AT = 40
_HEADERS = ("imagesource:", "gsd:")  # of DOTA
_SCORED = "detections with a score taken as ground truth"


def kind_of_line(line: str) -> str | None:
    """``yolo``, ``kitti`` or ``dota`` by the form of a line; None for others."""
    words = line.split()
    if len(words) in (15, 16) and numbers(words[1:]) and not numbers(words[:1]):
        return "kitti"
    if len(words) in (9, 10) and numbers(words[:8]) and not numbers(words[8:9]):
        return "dota"
    if re.fullmatch(r"\d+(\.0+)?", words[0]) and len(words) >= 5:
        values = numbers(words[1:])
        # A box, or a polygon of three points or more.
        is_shape = len(words) == 5 or (len(words) >= 7 and len(words) % 2 == 1)
        if values and is_shape and all(-1 <= v <= 2 or math.isnan(v) for v in values):
            return "yolo"
    return None


def fault_of_line(line: str) -> str:
    """Quote a line and name the rule of the nearest format that it breaks."""
    words = line.split()
    no_numbers = [word for word in words if not numbers([word])]
    if re.search("[,;]", line):
        fault = "columns are separated by spaces, not by commas"
    elif len(words) in (15, 16):
        wrong = repr(no_numbers[-1]) if no_numbers else repr(words[0])
        fault = f"KITTI has a class and then numbers, not {wrong}"
    elif len(words) == 5 and no_numbers == words[:1]:
        fault = "a YOLO label begins with the number of its class"
    elif len(words) == 6 and not no_numbers:
        fault = (
            "a YOLO label has 5 numbers; a 6th is the confidence of a detection, which "
            "is not ground truth"
        )
    elif len(words) >= 5 and not no_numbers and max(map(float, words[1:])) > 1:
        fault = "YOLO coordinates are fractions of the image (0 to 1), not pixels"
    else:
        fault = (
            f"{len(words)} columns, but YOLO has 5 (class number, centre x, centre y, "
            "width, height), DOTA 9 or 10 (8 numbers, class, difficult), KITTI 15"
        )
    return f"{line[:80]!r}: {fault}"


def first_fault(tree: Tree) -> str | None:
    """The first line, in a file named like an image, that is a label of no format."""
    for path in tree.with_suffix(".txt"):
        if stem(path).lower() in tree.images_by_stem:
            for number, line in enumerate(tree.lines(path), start=1):
                if line and kind_of_line(line) is None:
                    return f"{path}:{number}: {fault_of_line(line)}"
    return None


def kind_of_file(tree: Tree, path: str) -> str | None:
    """The format of a label file by its first recognizable line."""
    for line in tree.lines(path)[:20]:
        if line and not line.lower().startswith(_HEADERS):
            return kind_of_line(line)
    return None


def image_of(tree: Tree, path: str) -> str | None:
    """The image of a label file, by name: in the sibling folder or anywhere."""
    folder = parent(path)
    near = [folder]
    for part in reversed(folder.split("/")):
        others = _IMAGE_FOLDERS.get(part.lower(), ())
        if part.lower().startswith("labeltxt"):
            others = ("images", "image", "")
        found = (replace_part(folder, part, other) for other in others)
        near = [*(one for one in found if one is not None), *near]
        if others:
            break
    return tree.locate_image(stem(path), near, split_of_folder(folder))


def label_files(tree: Tree, kind: str) -> list[str]:
    """Text files of a kind; empty ones count if all others in their folder do."""
    files = tree.with_suffix(".txt")
    kinds = {path: kind_of_file(tree, path) for path in files}
    folders = {parent(path) for path, found in kinds.items() if found == kind}
    return [
        path
        for path, found in kinds.items()
        if found == kind
        or (found is None and parent(path) in folders and image_of(tree, path))
    ]


def recognise_kind(tree: Tree, kind: str) -> str | None:
    """Evidence that the text files named like images are mostly of a kind, or None."""
    named = [
        path
        for path in tree.with_suffix(".txt")
        if stem(path).lower() in tree.images_by_stem
    ]
    step = max(len(named) // _LOOKED_AT, 1)
    kinds = Counter(kind_of_file(tree, path) for path in named[::step])
    kinds.pop(None, None)
    if kinds and kinds.most_common(1)[0][0] == kind:
        return f"{len(named)} label files such as {named[0]}"
    return None


Parse = Callable[[str, Ledger, str], Box | None]


def read_label_files(tree: Tree, kind: str, parse: Parse, ledger: Ledger) -> Contents:
    """Read all label files of a kind; splits are folders named like splits.

    ``parse`` makes a box of a line, or records in the ledger (at its third argument)
    why not.
    """
    samples = []
    for path in label_files(tree, kind):
        image = image_of(tree, path)
        if image is None:
            ledger.drop("annotation files without an image", path)
            continue
        sample = Sample(image, path)
        for number, line in enumerate(tree.lines(path), start=1):
            if not line or line.lower().startswith(_HEADERS):
                continue
            box = parse(line, ledger, f"{path}:{number}")
            if box is not None:
                sample.boxes.append(box._replace(place=number))
        samples.append(sample)
    return Contents(samples, splits_by_folder(samples))


def _read_kitti(tree: Tree, options: Options, ledger: Ledger) -> Contents:
    contents = read_label_files(tree, "kitti", _kitti_box, ledger)
    scored = ledger.noted.get(_SCORED)
    if scored is not None and options.format != "kitti_detections":
        raise DataError(
            f"{tree.root}: {scored.times} lines have a 16th column, which is a score "
            f"(for instance {scored.example}): these are detections of a model, not "
            "ground truth. Use the labels with 15 columns, or train on the detections "
            "with format='kitti_detections'."
        )
    by_stem: dict[str, list[Sample]] = {}
    for sample in contents.samples:
        by_stem.setdefault(stem(sample.source), []).append(sample)

    def find(base: str, name: str) -> Sample | None:
        """The sample below the folder of ImageSets; training/ comes first."""
        below = f"{base}/" if base else ""
        found = [s for s in by_stem.get(name, ()) if s.source.startswith(below)]
        found.sort(key=lambda sample: split_of_folder(parent(sample.source)) != "train")
        return found[0] if found else None

    contents.splits = splits_by_image_sets(tree, find, ledger) or contents.splits
    return contents


def _kitti_box(line: str, ledger: Ledger, place: str) -> Box | None:
    """Parse 15 or 16 columns (Geiger et al. 2012, devkit_object/readme.txt)."""
    words = line.split()
    if kind_of_line(line) != "kitti":
        what = "lines that are no KITTI label of 15 or 16 columns"
        ledger.drop(what, f"{place}: {fault_of_line(line)}")
        return None
    if words[0] == "DontCare":
        ledger.drop("DontCare regions", place)
        return None
    if len(words) == 16:
        ledger.note(_SCORED, f"{place}: {words[15]}")
    # type, truncated, occluded, alpha, left, top, right, bottom, 7 of the 3D box
    x1, y1, x2, y2 = numbers(words[4:8]) or (0.0,) * 4
    return Box((x1, y1, x2, y2), words[0], 0)


KITTI = Format(
    name="kitti",
    looks_for="label_2/*.txt with 15 columns, beside image_2/",
    recognise=lambda tree: recognise_kind(tree, "kitti"),
    read=_read_kitti,
    fault=first_fault,
)
KITTI_DETECTIONS = replace(KITTI, name="kitti_detections", guessed=False)


def _read_dota(tree: Tree, options: Options, ledger: Ledger) -> Contents:
    return read_label_files(tree, "dota", _dota_box, ledger)


def _dota_box(line: str, ledger: Ledger, place: str) -> Box | None:
    """Parse four corners, class and difficulty (Xia et al. 2018) to an upright box."""
    words = line.split()
    if kind_of_line(line) != "dota":
        what = "lines that are no DOTA label (8 numbers, class, difficult)"
        ledger.drop(what, f"{place}: {fault_of_line(line)}")
        return None
    values = numbers(words[:8]) or ()
    xs, ys = values[0::2], values[1::2]
    difficult = words[9:] == ["1"]
    if difficult:
        ledger.note("objects marked difficult: kept as crowd", place)
    # min and max could hide a NaN.
    broken = sum(values) if sum(values) != sum(values) else 0.0
    corners = (min(xs) + broken, min(ys) + broken, max(xs), max(ys))
    return Box(corners, words[8], 0, crowd=difficult)


DOTA = Format(
    name="dota",
    looks_for="labelTxt/*.txt with 8 coordinates and a class, beside images/",
    recognise=lambda tree: recognise_kind(tree, "dota"),
    read=_read_dota,
    fault=first_fault,
)
