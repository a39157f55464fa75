"""CSV: one box per row, with a header in any order, or in keras-retinanet's layout.

Columns are found by name (``filename,width,height,class,xmin,ymin,xmax,ymax`` and
common synonyms, Open Images' relative boxes included). Without a header a row is
``path,x1,y1,x2,y2,class``, with five empty fields for an image without objects.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from damex.datasets.formats.records import (
    Box,
    Contents,
    Format,
    Ledger,
    Options,
    Sample,
    numbers,
    size_of,
)
from damex.datasets.formats.splits import split_of_table
from damex.datasets.formats.tree import (
    IMAGE_SUFFIXES,
    Tree,
    join,
    parent,
    some,
    split_name,
    split_of_file,
)
from damex.errors import ConfigError, DataError

# Column -> its names; case, blanks, dots and underscores are ignored.
_SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        "image": "filename file image imagepath filepath path img imagename imgname "
        "imageid imgid fname externalpath",
        "label": "class label name category classname labelname categoryname "
        "objectclass classlabel",
        "xmin": "xmin x1 left bboxxmin bboxx1 xtl xlower",
        "ymin": "ymin y1 top bboxymin bboxy1 ytl ylower",
        "xmax": "xmax x2 right bboxxmax bboxx2 xbr xupper",
        "ymax": "ymax y2 bottom bboxymax bboxy2 ybr yupper",
        "x": "x bboxx xleft",
        "y": "y bboxy ytop",
        "w": "w bw bboxw bboxwidth boxwidth",
        "h": "h bh bboxh bboxheight boxheight",
        "width": "width imagewidth imgwidth imwidth",
        "height": "height imageheight imgheight imheight",
        "split": "split set subset fold dataset usage",
        "crowd": "isgroupof iscrowd difficult",
    }
)
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_SHARE_OF_SWAPPED = 0.1
_LOOKED_AT = 200_000  # characters read to recognize a file


@dataclass
class _Table:
    """Rows of a CSV file: line number and fields by column."""

    path: str
    columns: dict[str, int]
    rows: list[tuple[int, list[str]]]
    header: bool
    fault: str | None = None


def _recognise(tree: Tree) -> str | None:
    found = []
    for path in tree.with_suffix(".csv"):
        table = _table(tree, path, limit=_LOOKED_AT)
        if table is not None:
            found.append(f"{path}{'' if table.header else ' (without a header)'}")
    return some(found) or None


def _fault(tree: Tree) -> str | None:
    """Header of the first file, if it has no box columns."""
    for path in tree.with_suffix(".csv")[:1]:
        header = tree.text(path, _LOOKED_AT).partition("\n")[0].strip()
        wanted = "filename, class, xmin, ymin, xmax and ymax"
        return f"{path}:1: {header[:80]!r} lacks columns such as {wanted}"
    return None


def _table(tree: Tree, path: str, limit: int = -1) -> _Table | None:
    """Read a file; None if it holds no boxes, such as a list of classes."""
    text = tree.text(path, limit)
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter)
    rows, fault = [], None
    try:
        for row in reader:
            if any(row):
                rows.append((reader.line_num, [field.strip() for field in row]))
    except csv.Error as error:
        fault = f'cannot be read beyond line {reader.line_num} ({error}); is a " lost?'
    if not rows:
        return None
    columns = _columns(rows[0][1])
    if "image" in columns and _box_columns(columns):
        return _Table(path, columns, rows[1:], header=True, fault=fault)
    return _headerless(path, rows, fault) if _has_image(rows[0][1]) else None


def _columns(header: Sequence[str]) -> dict[str, int]:
    keys = ["".join(c for c in word.lower() if c.isalnum()) for word in header]
    places = {}
    for column, names in _SYNONYMS.items():
        known = [keys.index(name) for name in names.split() if name in keys]
        if known:
            places[column] = known[0]
    return places


def _box_columns(columns: Mapping[str, int]) -> tuple[str, ...] | None:
    """The columns of a box; ``width`` and ``height`` are the image's or the box's."""
    for four in (_CORNERS, ("x", "y", "w", "h"), ("x", "y", "width", "height")):
        if all(column in columns for column in four):
            return four
    left_top = ("xmin", "ymin")
    if all(column in columns for column in left_top) and "xmax" not in columns:
        for size in (("w", "h"), ("width", "height")):
            if all(column in columns for column in size):
                return (*left_top, *size)
    return None


def _has_image(row: Sequence[str]) -> bool:
    return any(field.lower().endswith(tuple(IMAGE_SUFFIXES)) for field in row)


def _headerless(
    path: str, rows: list[tuple[int, list[str]]], fault: str | None
) -> _Table:
    """Rows without a header; only one order of columns can be recognized."""
    columns = ("image", *_CORNERS, "label")
    places = {column: place for place, column in enumerate(columns)}
    table = _Table(path, places, rows, header=False, fault=fault)
    boxes = [corners for _, row in rows if (corners := numbers(row[1:5])) is not None]
    fitting = [
        row
        for _, row in rows
        if len(row) == 6
        and _has_image(row[:1])
        and (numbers(row[1:5]) or not any(row[1:]))
    ]
    swapped = sum(len(b) == 4 and (b[2] <= b[0] or b[3] <= b[1]) for b in boxes)
    names_are_numbers = all(numbers(row[5:6]) for row in fitting if row[5])
    if len(fitting) < 0.5 * len(rows) or (boxes and names_are_numbers):
        fault = f"what its {len(rows[0][1])} columns are cannot be told"
    elif swapped > _SHARE_OF_SWAPPED * max(len(boxes), 1):
        fault = (
            f"{swapped} of {len(boxes)} rows are no path,x1,y1,x2,y2,class (x2 is not "
            "above x1, or y2 not above y1)"
        )
    if table.fault is None and fault is not None:
        table.fault = (
            f"has no header, and {fault}. Put a first line such as filename,xmin,ymin,"
            "xmax,ymax,class (or filename,x,y,w,h,class) above it."
        )
    return table


def _read(tree: Tree, options: Options, ledger: Ledger) -> Contents:
    tables = [
        table
        for path in tree.with_suffix(".csv")
        if (table := _table(tree, path)) is not None
    ]
    for table in tables:
        if table.fault is not None:
            raise DataError(f"{tree.root / table.path} {table.fault}")
    contents = Contents([])
    paths = [table.path for table in tables]
    descriptions = _descriptions(tree)
    for table in tables:
        reader = _Reader(tree, table, options, ledger, descriptions)
        samples = reader.samples()
        contents.samples += samples
        for split, listed in reader.splits.items():
            contents.splits.setdefault(split, []).extend(listed)
        own = split_of_table(table.path, paths)
        if not reader.splits and own is not None:
            contents.splits.setdefault(own, []).extend(samples)
    return contents


def _descriptions(tree: Tree) -> dict[str, str]:
    """Open Images' class codes such as /m/01g317, and their names."""
    names = {}
    for path in tree.with_suffix(".csv"):
        if "class-descriptions" in path:
            rows = csv.reader(io.StringIO(tree.text(path)))
            names.update({row[0]: row[1] for row in rows if len(row) == 2})
    return names


class _Reader:
    """Converts the rows of one file to samples."""

    def __init__(
        self,
        tree: Tree,
        table: _Table,
        options: Options,
        ledger: Ledger,
        descriptions: Mapping[str, str],
    ) -> None:
        self.tree, self.table, self.ledger = tree, table, ledger
        self.descriptions = descriptions
        self.columns = table.columns
        self.four = _box_columns(self.columns) or _CORNERS
        self.normalised = self._is_normalised()
        self.only_class = self._only_class(options)
        self.splits: dict[str, list[Sample]] = {}

    def _only_class(self, options: Options) -> str | None:
        """The class of all boxes if no column has it."""
        if "label" in self.columns:
            return None
        if options.classes is not None and len(options.classes) == 1:
            return options.classes[0]
        raise ConfigError(
            f"{self.tree.root / self.table.path} has no column with class names "
            "(class, label, name, category, LabelName); if all boxes are of one class, "
            "add classes=['its name']."
        )

    def _is_normalised(self) -> bool:
        """Whether boxes are relative: none above 1, and one neither 0 nor 1."""
        # Pixels are excluded: all boxes would be within the first one.
        any_fraction = False
        for _, row in self.table.rows:
            for value in numbers(self._fields(row, self.four)) or ():
                if value > 1.0 + 1e-6:
                    return False
                any_fraction |= 0.0 < value < 1.0
        return any_fraction

    def _fields(self, row: Sequence[str], columns: Sequence[str]) -> list[str]:
        """The fields of some columns; empty if the row is too short."""
        places = [self.columns.get(column, len(row)) for column in columns]
        return [row[place] if place < len(row) else "" for place in places]

    def samples(self) -> list[Sample]:
        """One sample per image, in the order of the file."""
        found: dict[str, Sample | None] = {}
        near = self._near()
        for line, row in self.table.rows:
            place = f"{self.table.path}:{line}"
            name = self._fields(row, ("image",))[0]
            if name not in found:
                found[name] = self._sample(name, near, row)
            sample = found[name]
            if sample is None:
                what = "boxes of images that are not there"
                self.ledger.drop(what, f"{place}: {name}")
            elif (box := self._box(row, place)) is not None:
                sample.boxes.append(box._replace(place=line))
        return [sample for sample in found.values() if sample is not None]

    def _near(self) -> list[str]:
        """Candidate image folders, likely ones first."""
        folder, split = parent(self.table.path), split_of_file(self.table.path)
        bases = dict.fromkeys([folder, parent(folder)])
        splits = [f for f in sorted(self.tree.folders) if split_name(f.split("/")[-1])]
        fitting = [f for f in splits if split and split_name(f.split("/")[-1]) == split]
        return [
            *fitting,
            *(join(b, n) for b in bases for n in ("", "images", "Images")),
        ]

    def _sample(self, name: str, near: list[str], row: Sequence[str]) -> Sample | None:
        split = split_of_file(self.table.path)
        image = self.tree.locate_image(name, near, split) if name else None
        if image is None:
            return None
        size = None
        if not {"width", "height"} & set(self.four):
            size = size_of(numbers(self._fields(row, ("width", "height"))))
        sample = Sample(image, self.table.path, [], size, self.normalised)
        word = self._fields(row, ("split",))[0]
        if word:
            self.splits.setdefault(split_name(word) or word, []).append(sample)
        return sample

    def _box(self, row: Sequence[str], place: str) -> Box | None:
        words = self._fields(row, self.four)
        label = self.only_class or self._fields(row, ("label",))[0]
        if not any(words) and (self.only_class or not label):
            return None  # an image without objects
        values = numbers(words)
        if values is None or not label:
            what = "rows without four numbers and a class"
            self.ledger.drop(what, f"{place}: {','.join(row)!r:.80}")
            return None
        crowd = self._fields(row, ("crowd",))[0].lower() in ("1", "true")
        if crowd:
            self.ledger.note("boxes marked as group or difficult: kept as crowd", place)
        a, b, c, d = values
        if self.four != _CORNERS:
            c, d = a + c, b + d
        return Box((a, b, c, d), self.descriptions.get(label, label), 0, crowd)


CSV = Format(
    name="csv",
    looks_for="a .csv with the columns filename, xmin, ymin, xmax, ymax, class, or "
    "without a header path,x1,y1,x2,y2,class",
    recognise=_recognise,
    read=_read,
    fault=_fault,
)
