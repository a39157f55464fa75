"""Finding: one thing that the check of the data has to say, and all kinds of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

LEVELS = ("error", "warning", "info")

# Findings of one kind about one file that are listed one by one; a last one counts the
# others, so that a million wrong boxes are no report of a million lines.
MAX_LISTED = 1000


class Kind(NamedTuple):
    """What a kind of finding means, and how bad it is unless something says more."""

    level: str
    meaning: str


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        # The annotation file.
        "file-missing": Kind("error", "there is no annotation file"),
        "not-json": Kind("error", "the annotation file is not JSON"),
        "missing-list": Kind("error", "no `images`, `annotations` or `categories`"),
        "wrong-type": Kind("error", "a record or a field has the wrong type"),
        "missing-field": Kind("error", "a record lacks a field that COCO promises"),
        "not-loaded": Kind("error", "the dataset class of the config cannot load"),
        "not-checked": Kind("info", "what was not checked, and why"),
        # Ids.
        "duplicate-image-id": Kind("error", "two images have one id"),
        "duplicate-annotation-id": Kind("error", "two annotations have one id"),
        "duplicate-category-id": Kind("error", "two categories have one id"),
        "duplicate-file-name": Kind("warning", "two records are of one image file"),
        "unknown-image-id": Kind("warning", "an annotation of an image not listed"),
        "unknown-category-id": Kind("warning", "an annotation of a class not listed"),
        # Boxes.
        "box-format": Kind("error", "`bbox` is not a list of four numbers"),
        "box-not-finite": Kind("error", "a box with NaN or infinity"),
        "box-negative": Kind("error", "a negative width or height"),
        "box-outside": Kind("error", "a box wholly outside of its image"),
        "box-partly-outside": Kind("warning", "beyond the border by more than 1 px"),
        "box-zero-size": Kind("warning", "a width or height of 0"),
        "box-thin": Kind("warning", "thinner than 1 px: left out of training"),
        "box-tiny": Kind(
            "info", "a class of which 10 % or more are below 4 px in training"
        ),
        "box-xyxy": Kind("error", "boxes look like x1, y1, x2, y2"),
        "box-normalised": Kind("error", "boxes look like shares of the image"),
        "duplicate-box": Kind("warning", "the same box of the same class twice"),
        "area-missing": Kind("info", "no `area`; it is taken from the box"),
        "area-zero": Kind("warning", "`area` is 0 or less: left out of training"),
        "area-inconsistent": Kind("warning", "`area` does not fit the box"),
        # Classes.
        "duplicate-class-name": Kind("error", "two categories have one name"),
        "similar-class-names": Kind("warning", "names that may mean one class"),
        "dummy-class": Kind("warning", "a category that is no class"),
        "unused-class": Kind("warning", "a class without any box"),
        "class-only-in-val": Kind("warning", "boxes in val or test, none in train"),
        "class-only-in-train": Kind("info", "boxes in train, none in val: no score"),
        "class-not-in-file": Kind("error", "val or test does not list a class"),
        "class-not-in-train": Kind("warning", "val lists a class that train does not"),
        "few-boxes": Kind("warning", "a class with fewer than 10 boxes in train"),
        "unknown-class": Kind("error", "`classes` or `rename` names no class"),
        # Boxes of an image.
        "image-without-boxes": Kind("info", "an image without boxes"),
        "many-boxes": Kind("warning", "more boxes than the detector has queries"),
        # Image files.
        "folder-missing": Kind("error", "there is no folder of images"),
        "image-missing": Kind("error", "there is no such image file"),
        "image-empty": Kind("error", "an image file of 0 bytes"),
        "image-unreadable": Kind("error", "a file that is no image"),
        "image-truncated": Kind("error", "an image file without its end"),
        "image-size": Kind("error", "width and height are not those of the file"),
        "image-rotated": Kind("error", "EXIF turns the image, and not its boxes"),
        "image-suffix": Kind("info", "the content is not what the suffix says"),
        # Across images.
        "leak-identical": Kind("error", "one image in train and in val or test"),
        "leak-near": Kind("warning", "nearly one image in train and in val or test"),
        "duplicate-image": Kind("warning", "two files with the same content"),
        "near-duplicate-image": Kind("info", "two images that look the same"),
        "fixed-camera": Kind("info", "images that look alike and show other objects"),
    }
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, odd or worth knowing.

    Args:
        level: ``error``, ``warning`` or ``info``.
        kind: One of ``KINDS``.
        dataset: Name of the dataset.
        file: The file that is at fault.
        record: What in it, such as ``annotation 17``; None for the file as a whole.
        message: What, what was expected, and what to do.
        count: How many records it stands for.
    """

    level: str
    kind: str
    dataset: str
    file: str
    record: str | None
    message: str
    count: int = 1

    def to_json(self) -> dict[str, Any]:
        """The fields that a report holds."""
        return {
            name: getattr(self, name)
            for name in ("level", "kind", "dataset", "file", "record", "message")
        }


class Said(NamedTuple):
    """What is said about a record.

    Args:
        record: Such as ``annotation 17``.
        text: What is wrong, what was expected, and what to do.
        owner: What it belongs to, such as the name of its image.
    """

    record: str
    text: str
    owner: str = ""


@dataclass(frozen=True)
class Place:
    """Whose findings these are.

    Args:
        dataset: Name of the dataset.
        file: Its annotation file.
    """

    dataset: str
    file: str

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
        """A finding about this file, or about ``file``; its message names both.

        ``owner`` is what the record belongs to.
        """
        file = file or self.file
        what = file + (f": {record}" if record else "")
        what += f" of {owner}" if owner else ""
        return Finding(
            level=level or KINDS[kind].level,
            kind=kind,
            dataset=self.dataset,
            file=file,
            record=record,
            message=f"dataset {self.dataset!r}: {what}: {text}",
            count=count,
        )

    def each(
        self,
        kind: str,
        found: Sequence[int],
        describe: Callable[[int], Said],
        *,
        level: str | None = None,
    ) -> Iterator[Finding]:
        """A finding for each of ``found``, and one for all beyond ``MAX_LISTED``.

        Args:
            kind: Of all of them.
            found: Positions of the records.
            describe: Position -> what is said.
            level: Of all of them; by default that of the kind.
        """
        for position in found[:MAX_LISTED]:
            record, text, owner = describe(int(position))
            yield self.finding(kind, record, text, owner=owner, level=level)
        rest = len(found) - MAX_LISTED
        if rest > 0:
            text = f"{rest} more records like the {MAX_LISTED} that are listed."
            yield self.finding(kind, None, text, level=level, count=rest)


def capped(findings: Iterable[Finding]) -> list[Finding]:
    """At most ``MAX_LISTED`` of each level and kind, and the number of the others."""
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
