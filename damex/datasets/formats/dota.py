"""DOTA's label files: four corners, class and difficulty per object.

Rotated boxes become the upright boxes around them (Xia et al. 2018, "DOTA", task 2).
The header lines ``imagesource:`` and ``gsd:`` are passed over.
"""

from __future__ import annotations

from damex.datasets.formats.label_files import (
    kind_of_line,
    numbers,
    read_label_files,
    recognise_kind,
)
from damex.datasets.formats.records import Box, Contents, Format, Ledger, Options
from damex.datasets.formats.tree import Tree


def _read(tree: Tree, options: Options, ledger: Ledger) -> Contents:
    return read_label_files(tree, "dota", _parse, ledger)


def _parse(line: str, ledger: Ledger, place: str) -> Box | None:
    words = line.split()
    if kind_of_line(line) != "dota":
        ledger.drop("lines that are no DOTA label (8 numbers, class, difficult)", place)
        return None
    values = numbers(words[:8]) or ()
    xs, ys = values[0::2], values[1::2]
    difficult = words[9:] == ["1"]
    if difficult:
        ledger.note("objects marked difficult: kept as crowd", place)
    # min and max would hide a NaN behind another corner.
    broken = sum(values) if sum(values) != sum(values) else 0.0
    corners = (min(xs) + broken, min(ys) + broken, max(xs), max(ys))
    return Box(corners, words[8], 0, crowd=difficult)


DOTA = Format(
    name="dota",
    looks_for="labelTxt/*.txt with 8 coordinates and a class, beside images/",
    recognise=lambda tree: recognise_kind(tree, "dota"),
    read=_read,
)
