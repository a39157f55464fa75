"""What a reader hands over: images with boxes as their files say, and what it lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from damex.datasets.formats.tree import Tree


class Box(NamedTuple):
    """One object as an annotation file has it.

    Attributes:
        corners: x1, y1, x2, y2: pixels, or shares of the image where its sample is
            ``normalised``. Nothing is checked yet.
        label: Class name.
        place: Where it stands: a line number, or words such as ``object 2``.
        crowd: Neither to be found nor a mistake: COCO's iscrowd, VOC's difficult.
        area: As stated, in square pixels; None where it follows from the box.
    """

    corners: tuple[float, float, float, float]
    label: str
    place: int | str
    crowd: bool = False
    area: float | None = None


@dataclass
class Sample:
    """One image and its boxes.

    Attributes:
        image: Path relative to the root.
        source: Annotation file, relative to the root.
        boxes: Its objects; an empty list says that there are none.
        stated_size: Width and height that the annotation states; None where it does
            not.
        normalised: Whether the boxes are shares of width and height.
    """

    image: str
    source: str
    boxes: list[Box] = field(default_factory=list)
    stated_size: tuple[int, int] | None = None
    normalised: bool = False


class Entry(NamedTuple):
    """How often something happened, and where for instance."""

    times: int
    example: str


@dataclass
class Ledger:
    """Counts of what was dropped and of what else a user should know."""

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
        samples: All images with annotations.
        splits: Lists of samples by ``train``, ``val``, ``test``, or by a list's own
            name where it is none of these. A sample may stand in several or in none.
        classes: Class names in the order of the format; None to sort those in use.
    """

    samples: list[Sample]
    splits: dict[str, list[Sample]] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Options:
    """What an entry says beside its root.

    Attributes:
        format: Name of the format; None to find it out.
        train: Split, folder, list of images or annotation file; several in a tuple.
        val: Same.
        test: Same.
        val_share: Share of the images for validation where the folder has none.
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
    """A format that damex reads.

    Attributes:
        name: For ``format=``.
        looks_for: What must lie in the folder, for messages.
        recognise: Says what of that a folder has; None if it is not of this format.
        read: Reads the folder.
        guessed: Whether it is recognised without ``format=``.
        fault: Quotes what keeps a folder from being recognised, where a file is nearly
            of the format; None if no file is.
    """

    name: str
    looks_for: str
    recognise: Callable[[Tree], str | None]
    read: Callable[[Tree, Options, Ledger], Contents]
    guessed: bool = True
    fault: Callable[[Tree], str | None] = lambda _: None


def numbers(words: Sequence[str]) -> tuple[float, ...] | None:
    """The words as numbers, NaN and infinity among them; None if one is no number."""
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        return None


def fault_of_names(names: Sequence[str], word: str = "name") -> str | None:
    """Why names cannot number the classes; None if they can.

    Args:
        names: Class names.
        word: Singular of what they are, such as ``line``.
    """
    for number, name in enumerate(names, start=1):
        if not name.strip():
            return f"{word} {number} is empty"
        if (first := names.index(name) + 1) < number:
            return f"{word} {first} and {word} {number} are both {name!r}"
    return None


def size_of(values: Sequence[float] | None) -> tuple[int, int] | None:
    """Width and height that an annotation states; None for 0, as some tools leave it.

    Args:
        values: The two numbers; None where they are not there, or no numbers.
    """
    if values is None or not all(0 < value < 1e6 for value in values):
        return None
    return round(values[0]), round(values[1])
