"""The ``key=value`` words of ``--cfg-options``, read and written."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from damex.errors import ConfigError

QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
QUOTES = ("'", '"')
CLOSING = {"[": "]", "(": ")", "{": "}", "dict(": ")"}
CLOSED = "])}"
BRACKETS = {char: 1 for char in "[({"} | {char: -1 for char in CLOSED}
SPECIAL = re.compile(r"[\[\](){},:='\"\\\s]")


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse the ``key=value`` words of ``--cfg-options``.

    A value is a number, ``True``, ``False`` (in any case), ``None``, or else a text,
    blanks included. Commas or brackets make lists (``a,b``, ``[a,b]``), tuples
    (``(1,2)``) and dicts (``{type: X}``, ``dict(type=X)``) of such values; quotes make
    a text of anything: ``"1e3"``, ``"a,b"``. ConfigError if a word has no ``=``, or a
    value's brackets or quotes do not match.
    """
    options = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key and equals):
            raise ConfigError(f"--cfg-options: {word!r} is not key=value.")
        try:
            options[key] = _read(text)
        except ValueError as error:
            raise ConfigError(
                f"--cfg-options: the {error} of {word!r} do not match; write "
                "key=[a,b], key=(a,b), key=\"{'type': 'X'}\", or a text in quotes, as "
                "in key='\"a, b\"'."
            ) from error
    return options


def option_of(key: str, value: Any) -> str:
    """Return the ``key=value`` word that `parse_options` reads as this value.

    ConfigError if the value is not made of numbers, texts, True, False, None, lists,
    tuples and dicts.
    """
    return f"{key}={_written(value, key)}"


def _read(text: str) -> Any:
    text = text.strip()
    if QUOTED.fullmatch(text):
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):  # such as a path of Windows: "C:\Users"
            return text[1:-1]
    opening = next((one for one in CLOSING if text.startswith(one)), None)
    if opening is not None and _is_enclosed(text):
        inside = text[len(opening) : -1]
        parts = _split(inside, ",") if inside.strip() else []
        if opening in ("{", "dict("):
            mark = ":" if opening == "{" else "="
            return dict(_item(part, mark) for part in parts)
        return (tuple if opening == "(" else list)(map(_read, parts))
    parts = _split(text, ",")
    return [*map(_read, parts)] if len(parts) > 1 or "," in text[-1:] else _word(text)


def _item(text: str, mark: str) -> tuple[Any, Any]:
    key, *values = _split(text, mark)
    name = _read(key)
    if not values or isinstance(name, list | dict):
        raise ValueError("brackets")
    return name, _read(mark.join(values))


def _word(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    constants = {"true": True, "false": False}
    return None if text == "None" else constants.get(text.lower(), text)


def _is_enclosed(text: str) -> bool:
    """Whether the first bracket of a value is closed by its last character."""
    rows = [*_outside_quotes(text)]
    open_ends: list[str] = []
    for _, char, _ in rows:
        if char in CLOSED and (not open_ends or open_ends.pop() != char):
            raise ValueError("brackets")
        open_ends += CLOSING.get(char, "")
    if open_ends:
        raise ValueError("brackets")
    ends = [place for place, char, depth in rows if char in CLOSED and not depth]
    return ends[0] == len(text) - 1


def _split(text: str, mark: str) -> list[str]:
    """Split at marks outside of brackets and quotes; an empty last part is left out."""
    places = [
        p for p, char, depth in _outside_quotes(text) if char == mark and not depth
    ]
    starts = [0, *(place + 1 for place in places)]
    parts = [text[a:b] for a, b in zip(starts, [*places, len(text)], strict=True)]
    return parts if parts[-1].strip() or len(parts) == 1 else parts[:-1]


def _outside_quotes(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield place, character, and depth of brackets behind it, outside of quotes.

    A quote opens at the start of a word only: ``driver's license`` has none.
    """
    place, depth, before = 0, 0, ","
    while place < len(text):
        char = text[place]
        if char in QUOTES and before in "[({,:=":
            quoted = QUOTED.match(text, place)
            if quoted is None:
                raise ValueError("quotes")
            place = quoted.end()
            before = char
            continue
        depth = max(depth + BRACKETS.get(char, 0), 0)
        yield place, char, depth
        before = before if char.isspace() else char
        place += 1


def _written(value: Any, where: str) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        is_plain = not SPECIAL.search(value) and value != "" and _word(value) == value
        return value if is_plain else repr(str(value))
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, Real):  # also of numpy
        return repr(int(value) if isinstance(value, Integral) else float(value))
    if isinstance(value, Mapping):
        rows = (f"{_written(k, where)}: {_written(v, where)}" for k, v in value.items())
        return f"{{{', '.join(rows)}}}"
    if isinstance(value, list | tuple):
        first, last = "[]" if isinstance(value, list) else "()"
        return first + ",".join(_written(one, where) for one in value) + last
    raise ConfigError(
        f"{where}={value!r} is of type {type(value).__name__}; options are numbers, "
        "texts, True, False, None, lists, tuples and dicts."
    )
