"""Output of the readers: images with boxes as in their files, and drop counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from damex.datasets.formats.tree import Tree

_SHOWN_CLASSES = 12

Corners = tuple[float, float, float, float]


class Box(NamedTuple):
    """One object as in an annotation file, unchecked.

    Attributes:
        corners: x1, y1, x2, y2 in pixels, or relative if the sample is ``normalised``.
        place: Origin: a line number, or words such as ``object 2``.
        crowd: Ignored in evaluation: COCO's iscrowd, VOC's difficult.
        area: As stated, in square pixels; None for the area of the box.
    """

    corners: Corners
    label: str
    place: int | str
    crowd: bool = False
    area: float | None = None


@dataclass
class Sample:
    """One image and its boxes; paths are relative to the root.

    ``stated_size`` is (width, height); ``normalised`` boxes are relative to it.
    """

    image: str
    source: str
    boxes: list[Box] = field(default_factory=list)
    stated_size: tuple[int, int] | None = None
    normalised: bool = False


@dataclass
class Contents:
    """Everything that a reader found.

    Attributes:
        splits: Samples by ``train``, ``val``, ``test`` or the name of another list;
            they may overlap and be incomplete.
        classes: Class names in the order of the format; None to sort those in use.
    """

    samples: list[Sample]
    splits: dict[str, list[Sample]] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None


class Count(NamedTuple):
    """How often something happened, and an example."""

    times: int
    example: str


@dataclass
class SplitSummary:
    """Numbers of images, of images without boxes, and of boxes per class of a split."""

    images: int
    empty: int
    boxes: dict[str, int]

    def line(self) -> str:
        """One line: images, boxes, and the most frequent classes."""
        counts = sorted(self.boxes.items(), key=lambda item: -item[1])
        shown = [f"{' '.join(name.split())} {n}" for name, n in counts[:_SHOWN_CLASSES]]
        if len(counts) > _SHOWN_CLASSES:
            shown.append(f"and {len(counts) - _SHOWN_CLASSES} classes more")
        empty = f" ({self.empty} without boxes)" if self.empty else ""
        total = sum(self.boxes.values())
        return f"{self.images} images{empty}, {total} boxes: {', '.join(shown)}"


@dataclass
class Summary:
    """Summary of a converted dataset, with its drop counts.

    Attributes:
        evidence: Reason for recognizing the format.
        splits: Size per split.
        dropped: Counts and examples of dropped records, by reason.
        noted: The same for records that were changed, guessed or odd.
    """

    root: str
    format: str
    evidence: str
    classes: tuple[str, ...] = ()
    splits: dict[str, SplitSummary] = field(default_factory=dict)
    dropped: dict[str, Count] = field(default_factory=dict)
    noted: dict[str, Count] = field(default_factory=dict)

    def drop(self, reason: str, example: str, times: int = 1) -> None:
        """Count records that are left out."""
        _add(self.dropped, reason, example, times)

    def note(self, what: str, example: str, times: int = 1) -> None:
        """Count something that was kept, changed or guessed."""
        _add(self.noted, what, example, times)

    def text(self, name: str) -> str:
        """Several lines for the screen; the first begins with ``name``."""
        lines = [f"{name}: {self.format} data in {self.root} ({self.evidence})"]
        lines += [f"  {split}: {size.line()}" for split, size in self.splits.items()]
        for word, counts in (("left out", self.dropped), ("note", self.noted)):
            lines += [
                f"  {word}: {count.times} {what} (for instance {count.example})"
                for what, count in counts.items()
            ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Summary:
        """Inverse of :meth:`to_dict`."""
        splits = {k: SplitSummary(**v) for k, v in values["splits"].items()}
        counts = {
            key: {what: Count(*count) for what, count in values[key].items()}
            for key in ("dropped", "noted")
        }
        classes = tuple(values["classes"])
        return cls(**{**values, **counts, "splits": splits, "classes": classes})


def _add(counts: dict[str, Count], what: str, example: str, times: int) -> None:
    if times:
        first = counts.get(what, Count(0, example))
        counts[what] = Count(first.times + times, first.example)


@dataclass(frozen=True)
class Options:
    """Options of an entry with ``root``.

    Attributes:
        train: Splits, folders, lists of images or annotation files, as for val and
            test.
        val_share: Share of the images for validation if the folder has none.
        classes: Class names; they number the classes of a format without names.
    """

    format: str | None = None
    train: tuple[str, ...] | None = None
    val: tuple[str, ...] | None = None
    test: tuple[str, ...] | None = None
    val_share: float | None = None
    classes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Format:
    """A supported format.

    Attributes:
        looks_for: Required contents of the folder, for messages.
        recognise: Returns the evidence in a folder; None if it is not of this format.
        read: Returns the images, and counts drops.
        fault: Explains why a folder that is nearly of the format is not recognized.
        guessed: Whether it is recognized without ``format=``.
    """

    name: str
    looks_for: str
    recognise: Callable[[Tree], str | None]
    read: Callable[[Tree, Options, Summary], Contents]
    fault: Callable[[Tree], str | None] = lambda _: None
    guessed: bool = True


def numbers(words: Sequence[str]) -> tuple[float, ...] | None:
    """The words as numbers, NaN and infinity included; None if one is not a number."""
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        return None


def enclosing_box(points: Sequence[float]) -> Corners:
    """The upright box around points x1, y1, x2, y2, ...; NaN if one is."""
    if any(map(math.isnan, points)):
        return (math.nan,) * 4
    return min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])


def fault_of_names(names: Sequence[str], word: str = "name") -> str | None:
    """Why names cannot number the classes, or None; ``word`` is a singular noun."""
    for number, name in enumerate(names, start=1):
        if not name.strip():
            return f"{word} {number} is empty"
        if (first := names.index(name) + 1) < number:
            return f"{word} {first} and {word} {number} are both {name!r}"
    return None


def size_of(values: Sequence[float] | None) -> tuple[int, int] | None:
    """Width and height of an annotation; None if missing or 0."""
    if values is None or not all(0 < value < 1e6 for value in values):
        return None
    return round(values[0]), round(values[1])
