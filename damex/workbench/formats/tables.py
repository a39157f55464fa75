"""Files with the boxes of many images: CSV, and the text files of WIDER FACE.

CSV has one box per row. Columns are found by name (``filename,width,height,class,xmin,
ymin,xmax,ymax`` and common synonyms, Open Images' relative boxes included). Without a
header a row is ``path,x1,y1,x2,y2,class`` (keras-retinanet), with five empty fields for
an image without objects.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from damex.datasets.entries import Options, Summary
from damex.datasets.image_files import IMAGE_SUFFIXES
from damex.errors import ConfigError, DataError
from damex.files import glance
from damex.workbench.formats.records import (
    Box,
    Contents,
    Format,
    Sample,
    drop_namesakes,
    is_set,
    is_share,
)
from damex.workbench.formats.tree import Tree, numbers, size_of, some, split_name

# Column -> its names; case, blanks, dots and underscores are ignored.
_SYNONYMS: Mapping[str, str] = {
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
    "crowd": "isgroupof iscrowd",
    "difficult": "difficult",
}
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
# Columns of a box, likely first; width and height may be the image's or the box's.
_BOXES = (
    _CORNERS,
    ("x", "y", "w", "h"),
    ("x", "y", "width", "height"),
    ("xmin", "ymin", "w", "h"),
    ("xmin", "ymin", "width", "height"),
)
_FLAGS = ("crowd", "difficult")
_HEADERLESS = ("image", *_CORNERS, "label")
_SHARE_OF_SWAPPED = 0.1
_LOOKED_AT = 200_000  # characters read to recognize a file
_WIDER = "_bbx_gt.txt"
_MISSING_BOXES = "boxes of images that are missing or ambiguous"


@dataclass
class _Table:
    """Rows of a CSV file (line number and fields), and its columns by name."""

    path: str
    columns: Mapping[str, int]
    box: tuple[str, ...]
    rows: list[tuple[int, list[str]]]
    header: bool = True
    problem: str | None = None

    def fields(self, row: Sequence[str], *columns: str) -> list[str]:
        """The fields of some columns; empty if the row is too short."""
        places = [self.columns.get(column, len(row)) for column in columns]
        return [row[place] if place < len(row) else "" for place in places]


def _tables(tree: Tree) -> dict[str, _Table]:
    """The beginnings of the files with boxes, by path."""
    texts = ((p, glance(tree.raw(p, _LOOKED_AT))) for p in tree.with_suffix(".csv"))
    opened = ((path, _open(path, text)) for path, text in texts)
    return {path: table for path, table in opened if table is not None}


def _recognise_csv(tree: Tree) -> str | None:
    found = [
        f"{path}{'' if table.header else ' (without a header)'}"
        for path, table in _tables(tree).items()
    ]
    return some(found) or None


def _problem_of_csv(tree: Tree) -> str | None:
    """Header of the first file, if it has no box columns."""
    for path in tree.with_suffix(".csv")[:1]:
        header = next(iter(tree.glanced(path, _LOOKED_AT)), "")
        wanted = "filename, class, xmin, ymin, xmax and ymax"
        return f"{path}:1: {header[:80]!r} lacks columns such as {wanted}"
    return None


def _open(path: str, text: str) -> _Table | None:
    """Parse a file; None if it holds no boxes, such as a list of classes."""
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    # A quote after a blank quotes, too.
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    rows, problem = [], None
    try:
        for row in reader:
            if any(row):
                rows.append((reader.line_num, [field.strip() for field in row]))
    except csv.Error as error:
        problem = (
            f'cannot be read beyond line {reader.line_num} ({error}); is a " lost?'
        )
    if not rows:
        return None
    header = rows[0][1]
    keys = ["".join(c for c in word.lower() if c.isalnum()) for word in header]
    columns = {
        column: _choose(column, known, rows[1:])
        for column, names in _SYNONYMS.items()
        if (known := [keys.index(name) for name in names.split() if name in keys])
    }
    for box in _BOXES:
        if columns.keys() >= {"image", *box}:
            return _Table(path, columns, box, rows[1:], problem=problem)
    if not _has_image(header):
        return None
    places = {column: place for place, column in enumerate(_HEADERLESS)}
    if problem is None and not _are_headerless(rows):
        problem = (
            "has no header, and its rows are not path,x1,y1,x2,y2,class. Put a first "
            "line such as filename,xmin,ymin,xmax,ymax,class (or filename,x,y,w,h,"
            "class) above it."
        )
    return _Table(path, places, _CORNERS, rows, header=False, problem=problem)


def _choose(
    column: str, places: Sequence[int], rows: Sequence[tuple[int, list[str]]]
) -> int:
    """The place of a column that several have the name of.

    Names of classes rather than their numbers, and paths rather than file names that
    several folders share; else the likeliest name.
    """

    def fields(place: int) -> set[str]:
        return {row[place] for _, row in rows if place < len(row)} - {""}

    if len(places) == 1 or column not in ("label", "image"):
        return places[0]
    if column == "image":
        return max(places, key=lambda place: len(fields(place)))
    for place in places:
        if numbers([*fields(place)]) is None and not _has_image([*fields(place)]):
            return place
    return places[0]


def _has_image(row: Sequence[str]) -> bool:
    return any(field.lower().endswith(tuple(IMAGE_SUFFIXES)) for field in row)


def _are_headerless(rows: list[tuple[int, list[str]]]) -> bool:
    """Whether rows are in the only order of columns that is clear without a header."""
    boxes = [corners for _, row in rows if (corners := numbers(row[1:5])) is not None]
    fitting = [
        row
        for _, row in rows
        if len(row) == len(_HEADERLESS)
        and _has_image(row[:1])
        and (numbers(row[1:5]) or not any(row[1:]))
    ]
    swapped = sum(len(b) == 4 and (b[2] <= b[0] or b[3] <= b[1]) for b in boxes)
    names_are_numbers = all(numbers(row[5:6]) for row in fitting if row[5])
    return (
        len(fitting) >= 0.5 * len(rows)
        and not (boxes and names_are_numbers)
        and swapped <= _SHARE_OF_SWAPPED * max(len(boxes), 1)
    )


def _read_csv(tree: Tree, options: Options, summary: Summary) -> Contents:
    contents = Contents([])
    names = _descriptions(tree)
    opened = (_open(path, tree.text(path)) for path in _tables(tree))
    tables = [table for table in opened if table is not None]
    for table in tables:
        if table.problem is not None:
            raise DataError(f"{tree.root / table.path} {table.problem}")
    for table in tables:
        samples, splits = _samples(tree, table, options, names, summary)
        own = tree.split_of_table(table.path, [table.path for table in tables])
        if not splits and own is not None:
            splits = {own: samples}
        contents.samples += samples
        for split, listed in splits.items():
            contents.splits.setdefault(split, []).extend(listed)
    drop_namesakes(tree, contents, summary)
    return contents


def _descriptions(tree: Tree) -> dict[str, str]:
    """Open Images' class codes such as /m/01g317, and their names."""
    names = {}
    for path in tree.with_suffix(".csv"):
        if "class-descriptions" in path:
            rows = csv.reader(io.StringIO(tree.text(path)))
            names.update({row[0]: row[1] for row in rows if len(row) == 2})
    return names


def _samples(
    tree: Tree,
    table: _Table,
    options: Options,
    names: Mapping[str, str],
    summary: Summary,
) -> tuple[list[Sample], dict[str, list[Sample]]]:
    """One sample per image, in the order of the file, and those with a named split."""
    only_class = _only_class(tree, table, options)
    normalised = _is_normalised(table)
    names_of_images = (table.fields(row, "image")[0] for _, row in table.rows)
    find = tree.image_finder(table.path, names_of_images)
    found: dict[str, Sample] = {}
    splits: dict[str, list[Sample]] = {}
    for line, row in table.rows:
        place = f"{table.path}:{line}"
        name, label, split = table.fields(row, "image", "label", "split")
        if (image := find(name, split and split_name(split))) is None:
            summary.drop(_MISSING_BOXES, f"{place}: {name}")
            continue
        if image not in found:
            stated = numbers(table.fields(row, "width", "height"))
            size = None if "width" in table.box else size_of(stated)
            found[image] = Sample(image, table.path, [], size, normalised)
            if split:
                splits.setdefault(split_name(split) or split, []).append(found[image])
        sample = found[image]
        words = table.fields(row, *table.box)
        values, label = numbers(words), only_class or names.get(label, label)
        if not any(words) and (only_class or not label):
            continue  # an image without objects
        if values is None or not label:
            what = "rows without four numbers and a class"
            summary.drop(what, f"{place}: {row!r:.80}")
            continue
        flags = zip(_FLAGS, table.fields(row, *_FLAGS), strict=True)
        is_crowd = any([is_set(word, flag, place, summary) for flag, word in flags])
        if is_crowd:
            summary.note("boxes marked as group or difficult: kept as crowd", place)
        a, b, c, d = values
        corners = (a, b, c, d) if table.box == _CORNERS else (a, b, a + c, b + d)
        sample.boxes.append(Box(corners, label, line, is_crowd))
    return [*found.values()], splits


def _only_class(tree: Tree, table: _Table, options: Options) -> str | None:
    """The class of all boxes if no column has it."""
    if "label" in table.columns:
        return None
    if options.classes is not None and len(options.classes) == 1:
        return options.classes[0]
    raise ConfigError(
        f"{tree.root / table.path} has no column with class names (class, label, name, "
        "category, LabelName); if all boxes are of one class, add "
        "classes=['its name']."
    )


def _is_normalised(table: _Table) -> bool:
    """Whether boxes are relative: all near the image, and one with a fraction."""
    # Pixels are excluded: all boxes would be within the first two.
    any_fraction = False
    for _, row in table.rows:
        for value in numbers(table.fields(row, *table.box)) or ():
            if not is_share(value):
                return False
            any_fraction |= 0.0 < value < 1.0
    return any_fraction


def _read_wider(tree: Tree, options: Options, summary: Summary) -> Contents:
    """Read blocks of an image, a number of faces, and a line per face.

    Columns of a line: x, y, width, height (pixels), blur, expression, illumination,
    invalid, occlusion, pose (Yang et al. 2016, readme.txt of wider_face_split).
    """
    contents = Contents([], classes=("face",))
    for path in tree.with_suffix(_WIDER):
        samples = list(_wider_samples(tree, path, summary))
        contents.samples += samples
        if (split := tree.split_of_file(path)) is not None:
            contents.splits.setdefault(split, []).extend(samples)
    return contents


def _wider_samples(tree: Tree, path: str, summary: Summary) -> Iterator[Sample]:
    """The blocks of a file; an empty one has a line of zeros, or none."""
    lines = tree.lines(path)
    find = tree.image_finder(path, (line for line in lines if _has_image([line])))
    sample: Sample | None = None
    announced = 0
    for number, line in enumerate(lines, start=1):
        place, words = f"{path}:{number}", line.split()
        quoted = f"{place}: {line!r:.80}"
        if _has_image([line]):
            sample, announced = Sample(find(line) or "", path), 0
            if sample.image:
                yield sample
            else:
                summary.drop(
                    "annotated images that are missing or ambiguous", f"{place}: {line}"
                )
        elif sample is None or not words or (len(words) == 1 and words[0].isdecimal()):
            announced = int(words[0]) if len(words) == 1 and sample else announced
        elif not announced:
            if {*words} != {"0"}:
                summary.drop("lines below an image without a number of faces", quoted)
        elif (values := numbers(words)) is None or len(values) < 4:
            summary.drop("lines that are not a face of 4 or 10 numbers", quoted)
        elif not sample.image:
            summary.drop(_MISSING_BOXES, place)
        else:
            x, y, width, height = values[:4]
            if invalid := is_set("".join(words[7:8]), "invalid", place, summary):
                summary.note("faces marked invalid: kept as crowd", place)
            corners = (x, y, x + width, y + height)
            sample.boxes.append(Box(corners, "face", number, crowd=invalid))


CSV = Format(
    name="csv",
    looks_for="a .csv with the columns filename, xmin, ymin, xmax, ymax, class, or "
    "without a header path,x1,y1,x2,y2,class",
    recognise=_recognise_csv,
    read=_read_csv,
    problem=_problem_of_csv,
)
WIDER_FACE = Format(
    name="wider_face",
    looks_for="wider_face_train_bbx_gt.txt with images in WIDER_train/images/",
    recognise=lambda tree: some(tree.with_suffix(_WIDER)[:1]) or None,
    read=_read_wider,
)
