"""Folders of datasets (``root=`` of an entry): their readers, and what these return.

``damex.workbench.formats`` fills the table of readers; nothing here imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from damex.errors import ConfigError, DataError, did_you_mean

SPLITS = ("train", "val", "test")
_SHOWN_CLASSES = 12


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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Summary:
        """Inverse of :func:`dataclasses.asdict`."""
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


class Conversion(NamedTuple):
    """Folder of a dataset's COCO files (``train.json`` etc.), and their summary."""

    folder: Path
    summary: Summary

    def file(self, split: str) -> Path | None:
        """The COCO file of a split, or None; ``test`` falls back to ``val``."""
        if split == "test" and split not in self.summary.splits:
            split = "val"
        return self.folder / f"{split}.json" if split in self.summary.splits else None


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

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Options:
        """The options of a mixture entry."""
        words = {key: as_words(entry.get(key)) for key in (*SPLITS, "classes")}
        return cls(entry.get("format"), val_share=entry.get("val_share"), **words)


# Name of a format -> the function that converts folders of it; None: that recognizes
# the format. Filled by damex.workbench.formats.
READERS: dict[str | None, Callable[[str, Options], Conversion]] = {}
# What `read_folders_once` keeps; None outside of it.
_KEPT: ContextVar[dict[Any, Conversion] | None] = ContextVar("kept", default=None)


@contextmanager
def read_folders_once() -> Iterator[None]:
    """Read each folder once in the block, however often entries are read.

    Listing a folder takes minutes on a network. A start of a command is one block, so
    that the next start sees a folder as it then is.
    """
    outer = _KEPT.get()
    token = _KEPT.set({} if outer is None else outer)
    try:
        yield
    finally:
        _KEPT.reset(token)


def read_folder(entry: Mapping[str, Any]) -> Conversion:
    """The COCO files of the folder ``root`` of a mixture entry.

    ConfigError if the format is unknown or ambiguous; DataError if the data cannot be
    read.
    """
    options = Options.of(entry)
    if (problem := problem_of_format(options.format)) is not None:
        raise ConfigError(f"dataset {entry['name']!r}: {problem}")
    root = str(entry["root"])
    kept = _KEPT.get()
    key, known = (str(Path(root).absolute()), options), {} if kept is None else kept
    if key not in known:
        try:
            known[key] = READERS[options.format](root, options)
        except (ConfigError, DataError) as error:
            raise type(error)(f"dataset {entry['name']!r}: {error}") from error
    return known[key]


def entry_of_folder(
    name: str, root: str | os.PathLike[str], known: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """A mixture entry for a folder, read as the ``known`` entry of its name was.

    Another folder than that of the entry keeps ``classes``, which may number them.
    """
    entry = next((dict(one) for one in known if one.get("name") == name), {})
    entry.pop("weight", None)  # a mixture needs it for all datasets, or for none
    place = Path(root).expanduser().resolve()
    if entry.get("root") and Path(entry["root"]).expanduser().resolve() == place:
        return entry
    kept = {key: entry[key] for key in entry.keys() & {"classes"}}
    return dict(name=name, root=str(root), **kept)


def problem_of_format(name: str | None) -> str | None:
    """Why a folder of a format cannot be read; None if it can."""
    if not READERS:
        return (
            "root='<folder>' has no readers yet; import damex.registry first, as "
            "custom_imports of a config does."
        )
    if name in READERS:
        return None
    names = [known for known in READERS if known is not None]
    return f"format={name!r} is unknown; {did_you_mean(str(name), names)}"


def as_words(value: Any) -> tuple[str, ...] | None:
    """One word or several as a tuple; None for None, empty for other types."""
    if value is None:
        return None
    words = [value] if isinstance(value, str) else value
    is_list = isinstance(words, (list, tuple))
    return tuple(words) if is_list and all(isinstance(w, str) for w in words) else ()


def problem_of_names(names: Sequence[str], word: str = "name") -> str | None:
    """Why names cannot number the classes, or None; ``word`` is a singular noun."""
    numbers: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        if not name.strip():
            return f"{word} {number} is empty"
        if (first := numbers.setdefault(name, number)) < number:
            return f"{word} {first} and {word} {number} are both {name!r}"
    return None
