"""Validation rules for the fields of the ``moe=`` tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Validation rule of a field; ``words`` describe it in messages.

    A dict is read into the dataclass ``nested`` if set, and gets ``type`` by default.
    """

    words: str
    is_allowed: Callable[[Any], bool]
    nested: Any = None
    type: str | None = None


def is_dict(value: Any) -> bool:
    """Whether a value is a dict or a config's dict."""
    return isinstance(value, Mapping)


def are_dicts(value: Any) -> bool:
    """Whether a value is a list of dicts."""
    return isinstance(value, (list, tuple)) and all(map(is_dict, value))


def one_of(*allowed: str) -> Rule:
    """Allow the given values."""
    return Rule(f"one of {allowed}", lambda value: value in allowed)


def number(words: str, *, below: float) -> Rule:
    """Allow numbers of 0 or more below a limit."""
    return Rule(
        f"a number {words}",
        lambda value: type(value) in (int, float) and 0.0 <= value < below,
    )


def numbers_or(unit: str, *names: str) -> Rule:
    """Allow a list of numbers, or one of the given names."""
    words = ", ".join(repr(name) for name in names[:-1]) + f" or {names[-1]!r}"
    return Rule(
        f"a list of {unit} numbers, {words}",
        lambda value: isinstance(value, (list, tuple)) or value in [*names],
    )


def module_of(kind: str) -> Rule:
    """Allow a dict for a module, with a default type."""
    return Rule(f"a dict with a type, such as dict(type={kind!r})", is_dict, type=kind)


def branch(nested: type, example: str) -> Rule:
    """Allow a dict that is read into a dataclass."""
    return Rule(f"a dict such as {example}", is_dict, nested=nested)


COUNT = Rule("an integer of 1 or more", lambda v: type(v) is int and v >= 1)
NUMBER = Rule("an integer of 0 or more", lambda v: type(v) is int and v >= 0)
FLAG = Rule("True or False", lambda value: isinstance(value, bool))
TEXT = Rule("a text", lambda value: isinstance(value, str))
LOSSES = Rule(
    "a list of dicts, each a dict with a type such as dict(type='LoadBalanceLoss')",
    are_dicts,
)
SHARE = Rule(
    "a number between 0 and 1, both left out",
    lambda value: isinstance(value, float) and 0.0 < value < 1.0,
)
LAYERS = numbers_or("layer", "all", "even")
STAGES = numbers_or("stage", "all", "even", "last")
NON_NEGATIVE = number("of 0 or more", below=math.inf)
BELOW_ONE = number("in [0, 1)", below=1.0)
