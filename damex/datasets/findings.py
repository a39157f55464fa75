"""Findings about data: their kinds, and the files they refer to.

`damex data check` prints them, and the loader raises the first error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from damex.errors import DataError

LEVELS = ("error", "warning", "info")

# Listed findings of one kind about one file; one more counts the rest.
MAX_LISTED = 1000


class Kind(NamedTuple):
    """Default level of a kind of finding, and its meaning."""

    level: str
    meaning: str


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        # The annotation file.
        "file-missing": Kind("error", "the annotation file is missing"),
        "not-json": Kind("error", "the annotation file is not JSON"),
        "missing-list": Kind("error", "no `images`, `annotations` or `categories`"),
        "wrong-type": Kind("error", "a record or a field has the wrong type"),
        "missing-field": Kind("error", "a record lacks a field that COCO promises"),
        "split-missing": Kind("error", "the config uses a split that the entry lacks"),
        "not-loaded": Kind("error", "the entry or its dataset class cannot load"),
        "not-checked": Kind("info", "checks that were not run, and why"),
        "left-out": Kind("warning", "records that reading the folder left out"),
        "noted": Kind("info", "what reading the folder changed or assumed"),
        # Ids.
        "duplicate-image-id": Kind("error", "two images have one id"),
        "duplicate-annotation-id": Kind("error", "two annotations have one id"),
        "duplicate-category-id": Kind("error", "two categories have one id"),
        "duplicate-file-name": Kind("warning", "two image records name the same file"),
        "unknown-image-id": Kind("warning", "an annotation of an unlisted image"),
        "unknown-category-id": Kind("warning", "an annotation of an unlisted class"),
        # Boxes.
        "box-format": Kind("error", "`bbox` is not a list of four numbers"),
        "box-not-finite": Kind("error", "a box with NaN or infinity"),
        "box-negative": Kind("error", "a negative width or height"),
        "box-outside": Kind("error", "a box entirely outside of its image"),
        "box-partly-outside": Kind("warning", "over 1 px beyond the border: clipped"),
        "box-zero-size": Kind("warning", "a side of 0 px: left out of training"),
        "box-thin": Kind("warning", "thinner than 1 px: left out of training"),
        "box-tiny": Kind(
            "info", "a class with 10% or more of its boxes below 4 px in training"
        ),
        "box-xyxy": Kind("error", "boxes look like x1, y1, x2, y2"),
        "box-normalised": Kind("error", "boxes look like shares of the image"),
        "box-ignored": Kind("warning", "marked `ignore`: left out of training"),
        "duplicate-box": Kind("warning", "the same box of the same class twice"),
        "area-missing": Kind("info", "no `area`; it is taken from the box"),
        "area-zero": Kind("warning", "`area` is 0 or less: left out of training"),
        "area-inconsistent": Kind("warning", "`area` does not fit the box"),
        # Classes.
        "duplicate-class-name": Kind("error", "two categories have one name"),
        "similar-class-names": Kind("warning", "names that may mean one class"),
        "dummy-class": Kind("warning", "a category that is not a class of objects"),
        "unused-class": Kind("warning", "a class without boxes"),
        "class-only-in-val": Kind("warning", "boxes in val or test, none in train"),
        "class-only-in-train": Kind("info", "boxes in train, none in val: no score"),
        "class-not-in-file": Kind("error", "val or test does not list a class"),
        "class-not-in-train": Kind("warning", "val lists a class that train does not"),
        "few-boxes": Kind("warning", "a class with fewer than 10 boxes in train"),
        "unknown-class": Kind("error", "`classes` or `rename` lists an unknown class"),
        "class-not-used": Kind("info", "boxes of a class that the entry leaves out"),
        # Images and their boxes.
        "no-images": Kind("error", "an annotation file without images"),
        "nothing-to-train": Kind("error", "no box in train that training can use"),
        "image-without-boxes": Kind("info", "an image without boxes"),
        "many-boxes": Kind("warning", "more boxes than the detector has queries"),
        # Image files.
        "folder-missing": Kind("error", "the folder of images does not exist"),
        "image-missing": Kind("error", "the image file does not exist"),
        "image-empty": Kind("error", "an image file of 0 bytes"),
        "image-unreadable": Kind("error", "a file that training cannot decode"),
        "image-truncated": Kind("error", "an image file that ends too early"),
        "image-size": Kind("error", "width or height is off by more than 1 px"),
        "image-elongated": Kind("error", "the resize of the config leaves 0 px of it"),
        "image-rotated": Kind("error", "EXIF rotates the image but not its boxes"),
        "image-depth": Kind("warning", "more than 8 bits per channel: mapped to 8"),
        "image-suffix": Kind("info", "the content does not match the suffix"),
        # Across images.
        "leak-identical": Kind("warning", "a training image is also in val or test"),
        "leak-near": Kind("warning", "a val or test image looks like a training image"),
        "duplicate-image": Kind("warning", "two files with the same content"),
        "near-duplicate-image": Kind("info", "two images that look the same"),
        "fixed-camera": Kind("info", "images that look alike but show other objects"),
    }
)

_BOX = "the box [x, y, width, height] = {record[bbox]} "
_CORRECT = "Correct the record, or remove it."
# Messages about single records; see `Records.each`.
TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "unknown-image-id": (
            "image_id {record[image_id]!r} is not that of an image: the box is left "
            "out. Correct it (a number and a text are different ids), or remove the "
            "record."
        ),
        "unknown-category-id": (
            "category_id {record[category_id]!r} is not listed: the box is left out. "
            "Expected one of {known}. Correct it, or add the category."
        ),
        "duplicate-file-name": (
            "{other} has the same file_name {record[file_name]!r}; each would teach "
            "that the objects of the other are background. Merge the two."
        ),
        "image-without-boxes": (
            "{image} has no box: training leaves it out, evaluation does not. Nothing "
            "to do if it shows no object."
        ),
        "many-boxes": (
            "{image} has {count} boxes, and the detector has {limit} queries, each of "
            "which finds one object at most. Set model.num_queries higher, or cut the "
            "image into tiles."
        ),
        "box-format": "bbox must be [x, y, width, height] in pixels, got {box}.",
        "box-not-finite": f"{_BOX}must have finite numbers. {_CORRECT}",
        "box-negative": (
            f"{_BOX}has a negative width or height; expected both above 0. {{advice}}"
        ),
        "box-outside": f"{_BOX}lies outside of the image ({{size}}). {{advice}}",
        "box-zero-size": f"{_BOX}has a side of 0: training leaves it out. {_CORRECT}",
        "box-thin": f"{_BOX}has a side below 1 px: training leaves it out. {_CORRECT}",
        "box-partly-outside": (
            f"{_BOX}reaches over the border of the image ({{size}}): training clips it."
            f" {_CORRECT}"
        ),
        "box-ignored": f"{_BOX}is marked 'ignore': training leaves it out.",
        "area-zero": (
            f"{_BOX}has the area {{record[area]:g}}, expected above 0: training leaves "
            "it out. Correct it."
        ),
        "area-inconsistent": (
            f"{_BOX}has the area {{record[area]:g}}, expected {{expected}}. Correct it."
        ),
        "duplicate-box": f"{_BOX}is that of {{first}}, too. Remove one of them.",
    }
)
# The kinds among them that are about images, not annotations.
OF_IMAGES = ("duplicate-file-name", "image-without-boxes", "many-boxes")


@dataclass(frozen=True)
class Finding:
    """An error, oddity or fact about data.

    Args:
        level: ``error``, ``warning`` or ``info``.
        kind: One of ``KINDS``.
        record: Record in the file, such as ``annotation 17``; None for the whole file.
        message: Problem, place, expectation, and advice.
        count: Number of records that it covers.
    """

    level: str
    kind: str
    dataset: str
    file: str
    record: str | None
    message: str
    count: int = 1

    def to_json(self) -> dict[str, Any]:
        """The fields of a report."""
        return {key: value for key, value in vars(self).items() if key != "count"}


@dataclass(frozen=True)
class Place:
    """The annotation file of one split.

    ``root`` is a converted folder, whose files are then named. Errors are warnings if
    another dataset class reads the file (``is_file=False``).
    """

    dataset: str
    file: str
    split: str = "train"
    root: str = ""
    is_file: bool = True

    @classmethod
    def of(cls, dataset: str, path: object, *, split: str, root: str = "") -> Place:
        """The place of a COCO file, which may be the conversion of a folder."""
        file = f"{root} ({split})" if root else str(Path(str(path)))
        return cls(dataset, file, split, root)

    def finding(
        self,
        kind: str,
        record: str | None,
        text: str,
        *,
        owner: str = "",
        level: str | None = None,
        file: str | None = None,
        count: int = 1,
    ) -> Finding:
        """A finding about this file or ``file``, as DATASET: FILE: RECORD of OWNER."""
        file = file or self.file
        usual = KINDS[kind].level
        usual = "warning" if usual == "error" and not self.is_file else usual
        what = file + (f": {record}" if record else "")
        what += f" of {owner}" if owner else ""
        start = f"dataset {self.dataset!r}: " if self.dataset else ""
        return Finding(
            level=level or usual,
            kind=kind,
            dataset=self.dataset,
            file=file,
            record=record,
            message=f"{start}{what}: {text}",
            count=count,
        )


def raise_first(findings: Iterable[Finding]) -> None:
    """Raise the first error as a DataError."""
    for finding in findings:
        if finding.level == "error":
            raise DataError(finding.message)


def capped(findings: Iterable[Finding]) -> list[Finding]:
    """At most ``MAX_LISTED`` findings of each level and kind, and a count of others."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        key = (finding.dataset, finding.level, finding.kind)
        groups.setdefault(key, []).append(finding)
    kept = []
    for (dataset, level, kind), group in groups.items():
        kept += group[:MAX_LISTED]
        count = sum(finding.count for finding in group[MAX_LISTED:])
        if count:
            place = Place(dataset, group[0].file)
            text = f"{count} more like the {MAX_LISTED} that are listed."
            kept.append(place.finding(kind, None, text, level=level, count=count))
    return kept
