"""Class names: those of one dataset checked, and spellings that may mean one class."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, takewhile
from typing import NamedTuple
from unicodedata import normalize

import numpy as np

from damex.datasets.coco_records import Records
from damex.datasets.coco_schema import Expectations
from damex.datasets.findings import Finding, Location
from damex.errors import did_you_mean

FEW_BOXES = 10
# Categories that exporters add, or that mean "nothing".
DUMMY_NAMES = frozenset(
    {"background", "bg", "dummy", "ignore", "none", "unlabeled", "unlabelled", "void"}
)
# Synonyms in datasets of everyday objects, mostly VOC's and COCO's.
SYNONYMS = (
    ("aeroplane", "airplane", "plane"),
    ("bike", "bicycle", "cycle"),
    ("cell phone", "mobile phone", "smartphone", "phone"),
    ("couch", "sofa", "settee"),
    ("cyclist", "bicyclist"),
    ("dining table", "table"),
    ("doughnut", "donut"),
    ("fridge", "refrigerator"),
    ("hair drier", "hair dryer"),
    ("lorry", "truck"),
    ("motorbike", "motorcycle"),
    ("people", "person", "human"),
    ("pedestrian", "person"),
    ("potted plant", "plant"),
    ("automobile", "auto", "car"),
    ("ship", "boat"),
    ("stop", "stop sign"),
    ("traffic light", "stoplight", "traffic signal"),
    ("tv monitor", "tv", "television", "monitor"),
)
SHORTEST = 5  # minimum letters of a name to allow a slip


class ClassCounts(NamedTuple):
    """Number of boxes by class of a split (0 if unused), and its first file."""

    location: Location
    boxes: Counter[str]


def are_labels(records: Records) -> np.ndarray:
    """Whether each annotation is taught, or scored: evaluation heeds crowds alone."""
    flags = ["iscrowd", *["ignore"] * (records.location.split == "train")]
    return ~np.any([records.is_set(flag) for flag in flags], axis=0)


def count_boxes(records: Records) -> Counter[str]:
    """Number of labels by class name in a file; 0 for an unused class."""
    found = Counter(records.class_N[are_labels(records)].tolist())
    boxes: Counter[str] = Counter()
    for number, name in enumerate(records.categories.values()):
        if name:
            boxes[name] += found[number]
    return boxes


def check_classes(
    train: ClassCounts | None,
    others: Sequence[ClassCounts],
    expected: Expectations,
    rename: Mapping[str, str],
) -> Iterator[Finding]:
    """Find oddities of the classes of a dataset; ``train`` is None if unreadable."""
    first = train or next(iter(others), None)
    if first is None:
        return
    yield from _check_names(first, expected, rename)
    if train is None:
        return
    for name, count in train.boxes.items() if train.boxes.total() else ():
        if expected.uses(name) and not _is_dummy(name):
            yield from _check_counts(name, count, train, others)
    for other in others if not expected.is_choice else ():
        for name in [name for name in other.boxes if name not in train.boxes]:
            text = (
                f"{other.boxes[name]} boxes of a class that the training set does not "
                f"list, so that they do not count; {did_you_mean(name, train.boxes)}"
            )
            yield other.location.finding("class-not-in-train", f"class {name!r}", text)


def _is_dummy(name: str) -> bool:
    return name.casefold().strip("_ ") in DUMMY_NAMES


def _check_names(
    counts: ClassCounts, expected: Expectations, rename: Mapping[str, str]
) -> Iterator[Finding]:
    finding = counts.location.finding
    for name in [name for name in rename if name not in counts.boxes]:
        text = (
            "rename in the mixture entry names it; "
            f"{did_you_mean(name, counts.boxes)} Correct 'rename'."
        )
        yield finding("unknown-class", f"class {name!r}", text)
    used = {name: n for name, n in counts.boxes.items() if expected.uses(name)}
    for first, name in _same_names(rename.get(name, name) for name in used):
        text = (
            f"it may be the same as the class {first!r}. If so, merge them: "
            f"rename={{{name!r}: {first!r}}} in the mixture entry."
        )
        yield finding("similar-class-names", f"class {name!r}", text)
    for name in filter(_is_dummy, used):
        text = (
            f"this category with {used[name]} boxes does not name objects, and would "
            "become an output of the detector. List the others in classes=[...] of the "
            "mixture entry."
        )
        yield finding("dummy-class", f"class {name!r}", text)


def _check_counts(
    name: str, count: int, train: ClassCounts, others: Sequence[ClassCounts]
) -> Iterator[Finding]:
    record = f"class {name!r}"
    if count == 0 and not any(other.boxes[name] for other in others):
        text = (
            "no label is of this class, and it becomes an output of the detector all "
            "the same. Leave it out with classes=[...] in the mixture entry."
        )
        yield train.location.finding("unused-class", record, text)
    elif 0 < count < FEW_BOXES:
        text = (
            f"{count} in the training set; expected {FEW_BOXES} boxes or more to learn "
            "a class. Add examples, or leave it out with classes=[...]."
        )
        yield train.location.finding("few-boxes", record, text)
    for other in others:
        here = other.boxes[name]
        if here and count == 0:
            text = (
                f"{here} boxes here and none in the training set, so that it "
                "cannot be learnt. Split the dataset again."
            )
            yield other.location.finding("class-only-in-val", record, text)
        elif count > 0 and name in other.boxes and not here:
            text = f"{count} boxes in the training set and none here: it has no score."
            yield other.location.finding("class-only-in-train", record, text)


def _same_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names that equal an earlier one but for case, spaces, punctuation or plural."""
    known: dict[str, str] = {}
    for name in dict.fromkeys(names):
        letters = _letters(name)
        first = next((known[s] for s in _singulars(letters) if s in known), None)
        if first is not None:
            yield first, name
        for word in _singulars(letters):
            known.setdefault(word, first or name)


def why_near(first: str, second: str) -> str | None:
    """Why two different names may mean the same: a key of the rule, or None."""
    if normalize("NFKC", first) == normalize("NFKC", second):
        return "unicode"
    if first.casefold() == second.casefold():
        return "case"
    a, b = _letters(first), _letters(second)
    if a == b:
        return "spaces"
    if a in _singulars(b) or b in _singulars(a):
        return "plural"
    if _meanings(a) & _meanings(b):
        return "synonym"
    return "spelling" if _is_slip(a, b) else None


def similar_names(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Pairs of different names that may mean the same, with why."""
    pairs = combinations(dict.fromkeys(names), 2)
    return [(a, b, why) for a, b in pairs if (why := why_near(a, b)) is not None]


@cache
def _letters(name: str) -> str:
    """A name without case, spaces and hyphens, in one of its spellings in Unicode."""
    return re.sub(r"[\W_]+", "", normalize("NFKC", name).casefold())


@cache
def _singulars(word: str) -> tuple[str, ...]:
    """A word, and words that it may be the plural of."""
    if len(word) < 3 or word.endswith("ss"):
        return (word,)
    endings = {"s": "", "es": "", "ies": "y"}
    shorter = (word.removesuffix(e) + y for e, y in endings.items() if word.endswith(e))
    return (word, *shorter)


@cache
def _meanings(word: str) -> frozenset[int]:
    """Rows of `SYNONYMS` that contain a word, in the singular or plural."""
    rows = [{*map(_letters, row)} for row in SYNONYMS]
    return frozenset(i for i, row in enumerate(rows) if row & {*_singulars(word)})


def _is_slip(a: str, b: str) -> bool:
    """Whether a letter is missing or wrong, or neighbors swapped; digits never are."""
    if min(len(a), len(b)) < SHORTEST or abs(len(a) - len(b)) > 1:
        return False
    same = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    start = len(list(same))
    rest_a, rest_b = a[start:], b[start:]
    if any(rest[:1].isdigit() for rest in (rest_a, rest_b)):
        return False
    if len(a) != len(b):
        return rest_a[1:] == rest_b or rest_a == rest_b[1:]
    swapped = rest_a[1::-1] + rest_a[2:]
    return rest_a[1:] == rest_b[1:] or swapped == rest_b
