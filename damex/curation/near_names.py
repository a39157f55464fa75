"""Class names that may be two spellings of one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from itertools import combinations, takewhile

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


def why_near(first: str, second: str) -> str | None:
    """Why two different names may mean the same: a key of the rule, or None.

    One of 'case', 'spaces', 'plural', 'synonym' and 'spelling'.
    """
    if first.casefold() == second.casefold():
        return "case"
    a, b = _letters(first), _letters(second)
    if a == b:
        return "spaces"
    if _are_one_and_many(a, b):
        return "plural"
    if _meanings(a) & _meanings(b):
        return "synonym"
    return "spelling" if _is_slip(a, b) else None


def near_pairs(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Pairs of different names that may mean the same, with why."""
    pairs = combinations(dict.fromkeys(names), 2)
    return [(a, b, why) for a, b in pairs if (why := why_near(a, b)) is not None]


@cache
def _letters(name: str) -> str:
    """A name without case, spaces and hyphens."""
    return re.sub(r"[\W_]+", "", name.casefold())


def _are_one_and_many(a: str, b: str) -> bool:
    one, many = sorted((a, b), key=len)
    endings = [f"{one}s", f"{one}es"]
    if one.endswith("y"):
        endings.append(f"{one[:-1]}ies")
    return many in endings


@cache
def _meanings(word: str) -> frozenset[int]:
    """Rows of `SYNONYMS` that contain a word, in the singular or plural."""
    return frozenset(
        number
        for number, row in enumerate(SYNONYMS)
        for known in map(_letters, row)
        if word == known or _are_one_and_many(word, known)
    )


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
