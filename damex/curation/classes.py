"""Check the classes of a dataset: names, and boxes in each split."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from damex.datasets.coco_records import Expectations, Records
from damex.datasets.findings import Finding, Place
from damex.errors import did_you_mean

FEW_BOXES = 10
# Categories that exporters add, or that mean "nothing".
DUMMY_NAMES = frozenset(
    {"background", "bg", "dummy", "ignore", "none", "unlabeled", "unlabelled", "void"}
)


@dataclass(frozen=True)
class ClassCounts:
    """Number of boxes by class of one annotation file; 0 for an unused class."""

    place: Place
    boxes: Mapping[str, int]

    @classmethod
    def of(cls, records: Records) -> ClassCounts:
        """Count the readable records of a file."""
        found = Counter(record["category_id"] for record in records.annotations)
        boxes: Counter[str] = Counter()
        for key, name in records.categories.items():
            if name:
                boxes[name] += found[key]
        return cls(records.place, boxes)


def check_classes(
    train: ClassCounts | None,
    others: Sequence[ClassCounts],
    expected: Expectations,
    rename: Mapping[str, str],
) -> Iterator[Finding]:
    """Find oddities of the classes of one dataset.

    ``train`` is None if it could not be read; ``others`` are validation and test.
    """
    first = train or next(iter(others), None)
    if first is None:
        return
    yield from _unknown_names(first, rename)
    yield from _similar_names(first, expected, rename)
    dummies = [*_dummies(first, expected)]
    yield from dummies
    is_dummy = {finding.record for finding in dummies}
    for name, count in first.boxes.items():
        record = f"class {name!r}"
        if not expected.uses(name) or record in is_dummy:
            continue
        if train is not None:
            elsewhere = sum(other.boxes.get(name, 0) for other in others)
            yield from _check_use(train.place, record, count, elsewhere)
            for other in others:
                yield from _check_other(other, name, count)
    if train is not None and not expected.is_choice:
        for other in others:
            yield from _not_in_train(train, other)


def _unknown_names(counts: ClassCounts, rename: Mapping[str, str]) -> Iterator[Finding]:
    for name in rename:
        if name not in counts.boxes:
            text = (
                "rename in the mixture entry names it; "
                f"{did_you_mean(name, counts.boxes)} Correct 'rename'."
            )
            yield counts.place.finding("unknown-class", f"class {name!r}", text)


def _similar_names(
    counts: ClassCounts, expected: Expectations, rename: Mapping[str, str]
) -> Iterator[Finding]:
    """Names that differ only by case, spaces, punctuation, or plural."""
    same: dict[str, list[str]] = {}
    names = dict.fromkeys(
        rename.get(name, name) for name in counts.boxes if expected.uses(name)
    )
    for name in names:
        same.setdefault(_bare(name), []).append(name)
    for first, *rest in same.values():
        for name in rest:
            yield counts.place.finding(
                "similar-class-names",
                f"class {name!r}",
                f"it may be the same as the class {first!r}. If so, merge them: "
                f"rename={{{name!r}: {first!r}}} in the mixture entry.",
            )


def _bare(name: str) -> str:
    """A name without case, spaces, punctuation and plural ending."""
    bare = re.sub(r"[\W_]+", "", name.casefold())
    if bare.endswith("ies") and len(bare) > 4:
        return bare[:-3] + "y"
    if bare.endswith(("sses", "xes", "ches", "shes")):
        return bare[:-2]
    is_plural = bare.endswith("s") and not bare.endswith("ss") and len(bare) > 3
    return bare[:-1] if is_plural else bare


def _dummies(counts: ClassCounts, expected: Expectations) -> Iterator[Finding]:
    for name, count in counts.boxes.items():
        if expected.uses(name) and name.casefold().strip("_ ") in DUMMY_NAMES:
            text = (
                f"this category with {count} boxes does not name objects, and would "
                "become an output of the detector. List the others in classes=[...] "
                "of the mixture entry."
            )
            yield counts.place.finding("dummy-class", f"class {name!r}", text)


def _check_use(
    place: Place, record: str, count: int, elsewhere: int
) -> Iterator[Finding]:
    if count == 0 and elsewhere == 0:
        text = (
            "no box is of this class, and it becomes an output of the detector all "
            "the same. Leave it out with classes=[...] in the mixture entry."
        )
        yield place.finding("unused-class", record, text)
    elif 0 < count < FEW_BOXES:
        text = (
            f"{count} in the training set; expected {FEW_BOXES} boxes or more to learn "
            "a class. Add examples, or leave it out with classes=[...]."
        )
        yield place.finding("few-boxes", record, text)


def _check_other(other: ClassCounts, name: str, in_train: int) -> Iterator[Finding]:
    record = f"class {name!r}"
    here = other.boxes.get(name)
    if in_train == 0 and here:
        text = (
            f"{here} boxes here and none in the training set, so that it "
            "cannot be learnt. Split the dataset again."
        )
        yield other.place.finding("class-only-in-val", record, text)
    elif in_train > 0 and here == 0:
        text = f"{in_train} boxes in the training set and none here: it has no score."
        yield other.place.finding("class-only-in-train", record, text)


def _not_in_train(train: ClassCounts, other: ClassCounts) -> Iterator[Finding]:
    for name, count in other.boxes.items():
        if name not in train.boxes:
            text = (
                f"{count} boxes of a class that the training set does not list, so "
                f"that they do not count; {did_you_mean(name, train.boxes)}"
            )
            yield other.place.finding("class-not-in-train", f"class {name!r}", text)
