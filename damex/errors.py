"""Error types, and messages with place, value, expectation and fix."""

from __future__ import annotations

import difflib
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType


class ConfigError(ValueError):
    """Invalid value in a config."""


class DataError(ValueError):
    """Dataset file that contradicts its config."""


# Controls of terminals and of the direction of text, line separators, and bytes that
# are not UTF-8 (surrogates). Tabs and line breaks stay.
_CONTROLS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def printable(text: str) -> str:
    r"""Text for a terminal: control characters, and bytes not in UTF-8, as ``\x1b``.

    Names in files and checkpoints of strangers may hold them. Tabs and line breaks are
    kept.
    """

    def escaped(found: re.Match[str]) -> str:
        code = ord(found[0])
        byte = code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code  # as in file names
        return f"\\x{byte:02x}" if byte < 0x100 else f"\\u{byte:04x}"

    return _CONTROLS.sub(escaped, text)


def did_you_mean(name: object, known: Iterable[str], *, limit: int = 20) -> str:
    """Suggest the nearest known name and list up to `limit` known ones.

    For example ``did you mean 'car'? It has: bus, car.``
    """
    names = [str(item) for item in known]
    lowered = {item.lower(): item for item in names}
    near = difflib.get_close_matches(str(name).lower(), lowered, n=1)
    start = f"did you mean {lowered[near[0]]!r}? It" if near else "it"
    shown = ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
    return f"{start} has: {shown or 'nothing'}."


def check_known(name: object, known: Collection[str], words: str) -> None:
    """Raise ConfigError with `words` and a suggestion unless a name is known."""
    if name not in known:
        raise ConfigError(f"{words}; {did_you_mean(name, known)}")


RANGES: Mapping[str, Callable[[float], bool]] = MappingProxyType(
    {
        ">= 0": lambda value: value >= 0.0,
        "above 0": lambda value: value > 0.0,
        "in [0, 1)": lambda value: 0.0 <= value < 1.0,
        "in [0, 1]": lambda value: 0.0 <= value <= 1.0,
        "in (0, 1]": lambda value: 0.0 < value <= 1.0,
    }
)


def check_number(owner: str, expected: str, **options: float | None) -> None:
    """Raise ConfigError unless each option is None or in the range `expected`."""
    for name, value in options.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if value is not None and not (is_number and RANGES[expected](value)):
            raise ConfigError(f"{owner}: {name} must be {expected}, got {value!r}")


def check_sizes(owner: str, **sizes: int) -> None:
    """Raise ConfigError unless all sizes are positive integers."""
    for name, size in sizes.items():
        is_count = isinstance(size, numbers.Integral) and not isinstance(size, bool)
        if not is_count or size < 1:
            expected = "an integer of 1 or more"
            raise ConfigError(f"{owner}: {name} must be {expected}, got {size!r}")


def check_choice(owner: str, choices: Iterable[str], **options: str) -> None:
    """Raise ConfigError unless each option is one of the choices."""
    names = [*choices]
    for name, value in options.items():
        if value not in names:
            raise ConfigError(f"{owner}: unknown {name} {value!r}; use one of {names}")
