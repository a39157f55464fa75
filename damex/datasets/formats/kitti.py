"""KITTI's label files: one line of 15 columns per object, 16 with a score.

Columns: type, truncated, occluded, alpha, left, top, right, bottom (pixels), and seven
for the object in space (Geiger et al. 2012, devkit_object/readme.txt).
"""

from __future__ import annotations

from damex.datasets.formats.image_sets import splits_by_image_sets
from damex.datasets.formats.label_files import (
    kind_of_line,
    numbers,
    read_label_files,
    recognise_kind,
)
from damex.datasets.formats.records import Box, Contents, Format, Ledger, Options
from damex.datasets.formats.tree import Tree, stem


def _read(tree: Tree, options: Options, ledger: Ledger) -> Contents:
    contents = read_label_files(tree, "kitti", _parse, ledger)
    by_stem = {stem(sample.source): sample for sample in contents.samples}
    listed = splits_by_image_sets(tree, lambda _, name: by_stem.get(name), ledger)
    contents.splits = listed or contents.splits
    return contents


def _parse(line: str, ledger: Ledger, place: str) -> Box | None:
    words = line.split()
    if kind_of_line(line) != "kitti":
        ledger.drop("lines that are no KITTI label of 15 or 16 columns", place)
        return None
    if words[0] == "DontCare":
        ledger.drop("DontCare regions", place)
        return None
    x1, y1, x2, y2 = numbers(words[4:8]) or (0.0,) * 4
    return Box((x1, y1, x2, y2), words[0], 0)


KITTI = Format(
    name="kitti",
    looks_for="label_2/*.txt with 15 or 16 columns, beside image_2/",
    recognise=lambda tree: recognise_kind(tree, "kitti"),
    read=_read,
)
