"""Summary of a conversion: recognized, kept and dropped records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from damex.datasets.formats.documents import count_classes
from damex.datasets.formats.records import Entry

_SHOWN_CLASSES = 12


@dataclass
class SplitSummary:
    """Numbers of images, of images without boxes, and of boxes per class of a split."""

    images: int
    empty: int
    boxes: dict[str, int]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> SplitSummary:
        """Count a COCO document."""
        filled = {record["image_id"] for record in document["annotations"]}
        images = len(document["images"])
        return cls(images, images - len(filled), count_classes(document))

    def line(self) -> str:
        """One line: images, boxes, and the most frequent classes."""
        counts = sorted(self.boxes.items(), key=lambda item: -item[1])
        shown = ", ".join(
            f"{' '.join(name.split())} {n}" for name, n in counts[:_SHOWN_CLASSES]
        )
        more = len(counts) - _SHOWN_CLASSES
        rest = f", and {more} classes more" if more > 0 else ""
        empty = f" ({self.empty} without boxes)" if self.empty else ""
        total = sum(self.boxes.values())
        return f"{self.images} images{empty}, {total} boxes: {shown}{rest}"


@dataclass
class Summary:
    """Summary of a converted dataset.

    Attributes:
        evidence: Reason for recognizing the format.
        splits: Size per split.
        dropped: Counts and examples of dropped records.
        noted: The same for records that were changed, guessed or odd.
    """

    root: str
    format: str
    evidence: str
    classes: tuple[str, ...]
    splits: dict[str, SplitSummary] = field(default_factory=dict)
    dropped: dict[str, Entry] = field(default_factory=dict)
    noted: dict[str, Entry] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Several lines for the screen; the first begins with ``name``."""
        lines = [f"{name}: {self.format} data in {self.root} ({self.evidence})"]
        lines += [f"  {split}: {size.line()}" for split, size in self.splits.items()]
        for word, entries in (("left out", self.dropped), ("note", self.noted)):
            lines += [
                f"  {word}: {entry.times} {what} (for instance {entry.example})"
                for what, entry in entries.items()
            ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self) | {
            key: {what: list(entry) for what, entry in getattr(self, key).items()}
            for key in ("dropped", "noted")
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Summary:
        """Inverse of :meth:`to_dict`."""
        return cls(
            **{
                **values,
                "classes": tuple(values["classes"]),
                "splits": {k: SplitSummary(**v) for k, v in values["splits"].items()},
                "dropped": {k: Entry(*v) for k, v in values["dropped"].items()},
                "noted": {k: Entry(*v) for k, v in values["noted"].items()},
            }
        )
