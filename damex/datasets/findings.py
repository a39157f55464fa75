"""Findings about data: their rules, and the files they refer to.

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


class Rule(NamedTuple):
    """Default level of the findings of a rule, and their meaning."""

    level: str
    meaning: str


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        # The annotation file.
        "file-missing": Rule("error", "the annotation file is missing"),
        "not-json": Rule("error", "the annotation file is not JSON"),
        "missing-list": Rule("error", "no `images`, `annotations` or `categories`"),
        "wrong-type": Rule("error", "a record or a field has the wrong type"),
        "missing-field": Rule("error", "a record lacks a field that COCO promises"),
        "split-missing": Rule("error", "the config uses a split that the entry lacks"),
        "not-loaded": Rule("error", "the entry or its dataset class cannot load"),
        "not-checked": Rule("info", "checks that were not run, and why"),
        "left-out": Rule("warning", "records that reading the folder left out"),
        "noted": Rule("info", "what reading the folder changed or assumed"),
        # Ids.
        "duplicate-image-id": Rule("error", "two images have one id"),
        "duplicate-annotation-id": Rule("error", "two annotations have one id"),
        "duplicate-category-id": Rule("error", "two categories have one id"),
        "duplicate-file-name": Rule("warning", "two image records name the same file"),
        "unknown-image-id": Rule("warning", "an annotation of an unlisted image"),
        "unknown-category-id": Rule("warning", "an annotation of an unlisted class"),
        # Boxes.
        "box-format": Rule("error", "`bbox` is not a list of four numbers"),
        "box-not-finite": Rule("error", "a box with NaN or infinity"),
        "box-negative": Rule("error", "a negative width or height"),
        "box-outside": Rule("error", "a box entirely outside of its image"),
        "box-partly-outside": Rule("warning", "over 1 px beyond the border: clipped"),
        "box-zero-size": Rule("warning", "a side of 0 px: left out of training"),
        "box-thin": Rule("warning", "thinner than 1 px: left out of training"),
        "box-tiny": Rule(
            "info", "a class with 10% or more of its boxes below 4 px in training"
        ),
        "boxes-small": Rule(
            "info", "most boxes below 16 px in training, of larger images: set `tile`"
        ),
        "box-xyxy": Rule("error", "boxes look like x1, y1, x2, y2"),
        "box-normalised": Rule("error", "boxes look like shares of the image"),
        "box-ignored": Rule(
            "warning", "marked `ignore`: left out of training, but not of evaluation"
        ),
        "duplicate-box": Rule("warning", "the same box of the same class twice"),
        "area-missing": Rule("info", "no `area`; it is taken from the box"),
        "area-zero": Rule("warning", "`area` is 0 or less: left out of training"),
        "area-inconsistent": Rule("warning", "`area` does not fit the box"),
        # Classes.
        "duplicate-class-name": Rule("error", "two categories have one name"),
        "similar-class-names": Rule("warning", "names that may mean one class"),
        "dummy-class": Rule("warning", "a category that is not a class of objects"),
        "unused-class": Rule("warning", "a class without boxes"),
        "class-only-in-val": Rule("warning", "boxes in val or test, none in train"),
        "class-only-in-train": Rule("info", "boxes in train, none in val: no score"),
        "class-not-in-file": Rule("error", "val or test does not list a class"),
        "class-not-in-train": Rule("warning", "val lists a class that train does not"),
        "few-boxes": Rule("warning", "a class with fewer than 10 boxes in train"),
        "unknown-class": Rule("error", "`classes` or `rename` lists an unknown class"),
        "class-not-used": Rule("info", "boxes of a class that the entry leaves out"),
        # Images and their boxes.
        "no-images": Rule("error", "an annotation file without images"),
        "nothing-to-train": Rule("error", "no box in train that training can use"),
        "image-without-boxes": Rule("info", "an image without boxes"),
        "many-boxes": Rule("warning", "more boxes than the detector has queries"),
        # Image files.
        "folder-missing": Rule("error", "the folder of images does not exist"),
        "image-missing": Rule("error", "the image file does not exist"),
        "image-empty": Rule("error", "an image file of 0 bytes"),
        "image-unreadable": Rule("error", "a file that training cannot decode"),
        "image-truncated": Rule("error", "an image file that ends too early"),
        "image-size": Rule("error", "width or height is off by more than 1 px"),
        "image-elongated": Rule("error", "the resize of the config leaves 0 px of it"),
        "image-rotated": Rule("error", "EXIF rotates the image but not its boxes"),
        "image-depth": Rule("warning", "more than 8 bits per channel: mapped to 8"),
        "image-suffix": Rule("info", "the content does not match the suffix"),
        # Across images.
        "leak-identical": Rule("warning", "a training image is also in val or test"),
        "leak-near": Rule("warning", "a val or test image looks like a training image"),
        "duplicate-image": Rule("warning", "two files with the same content"),
        "near-duplicate-image": Rule("info", "two images that look the same"),
        "fixed-camera": Rule("info", "images that look alike but show other objects"),
        "looks-alike": Rule("info", "two datasets whose images cannot be told apart"),
    }
)


@dataclass(frozen=True)
class Finding:
    """An error, oddity or fact about data.

    Args:
        level: ``error``, ``warning`` or ``info``.
        kind: Name of the rule, of ``RULES``.
        record: Record in the file, such as ``annotation 17``; None for the whole file.
        message: Problem, location, expectation, and advice.
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
class Location:
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
    def of(cls, dataset: str, path: object, *, split: str, root: str = "") -> Location:
        """The location of a COCO file, which may be the conversion of a folder."""
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
        usual = RULES[kind].level
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


def truncate_findings(findings: Iterable[Finding]) -> list[Finding]:
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
            location = Location(dataset, group[0].file)
            text = f"{count} more like the {MAX_LISTED} that are listed."
            kept.append(location.finding(kind, None, text, level=level, count=count))
    return kept
