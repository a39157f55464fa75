"""Output of the readers: images with boxes as in their files, and drop counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from damex.datasets.formats.tree import Tree


class Box(NamedTuple):
    """One object as in an annotation file, unchecked.

    Attributes:
        corners: x1, y1, x2, y2 in pixels, or relative if the sample is ``normalised``.
        place: Origin: a line number, or words such as ``object 2``.
        crowd: Ignored in evaluation: COCO's iscrowd, VOC's difficult.
        area: As stated, in square pixels; None for the area of the box.
    """

    corners: tuple[float, float, float, float]
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


class Entry(NamedTuple):
    """How often something happened, and an example."""

    times: int
    example: str


@dataclass
class Ledger:
    """Counts of dropped records and of other facts for the user."""

    dropped: dict[str, Entry] = field(default_factory=dict)
    noted: dict[str, Entry] = field(default_factory=dict)

    def drop(self, reason: str, example: str, count: int = 1) -> None:
        """Count records that are left out."""
        _add(self.dropped, reason, example, count)

    def note(self, what: str, example: str, count: int = 1) -> None:
        """Count something that was kept, changed or guessed."""
        _add(self.noted, what, example, count)


def _add(entries: dict[str, Entry], what: str, example: str, count: int) -> None:
    if count:
        first = entries.get(what, Entry(0, example))
        entries[what] = Entry(first.times + count, first.example)


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
        guessed: Whether it is recognized without ``format=``.
        fault: Explains why a folder that is nearly of the format is not recognized.
    """

    name: str
    looks_for: str
    recognise: Callable[[Tree], str | None]
    read: Callable[[Tree, Options, Ledger], Contents]
    guessed: bool = True
    fault: Callable[[Tree], str | None] = lambda _: None


def numbers(words: Sequence[str]) -> tuple[float, ...] | None:
    """The words as numbers, NaN and infinity included; None if one is not a number."""
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        return None


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
