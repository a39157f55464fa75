"""Arguments of a part of ``moe``, checked by its signature before it is built.

Python's own words for a wrong argument name neither the field of the config nor what
would be right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from damex.errors import ConfigError, did_you_mean

__all__ = ["check_arguments", "parameters_of"]

PLAIN = (bool, int, float, str, NoneType)


def check_arguments(
    part: Callable[..., Any], arguments: Mapping[str, Any], *, field: str
) -> None:
    """Refuse arguments that a part does not have, or of another type than it says.

    Only plain types are looked at: numbers, text, truth values, None and literals.

    Args:
        part: The class, or a function that builds the part.
        arguments: What the config sets, without ``type``.
        field: Where it stands, for instance ``moe.gate``.

    Raises:
        ConfigError: If an argument is unknown or has another type.
    """
    parameters = parameters_of(part)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = _hints(part)
    for name, value in arguments.items():
        if name not in parameters:
            if open_ended:
                continue
            raise ConfigError(
                f"{field}.{name} = {value!r} is no argument of {part.__name__}; "
                f"{did_you_mean(name, parameters)} What an inherited {field} sets goes "
                f"away with {field}._delete_=True."
            )
        allowed = list(_members(hints.get(name, Any)))
        if not _all_plain(allowed) or any(_fits(value, kind) for kind in allowed):
            continue
        kinds = " or ".join(_word(kind) for kind in allowed)
        raise ConfigError(f"{field}.{name} must be {kinds}, got {value!r}.")


def parameters_of(part: Callable[..., Any] | None) -> Mapping[str, inspect.Parameter]:
    """What a part takes, by name.

    Args:
        part: The class, or a function that builds the part; None takes nothing, and so
            does a module without an ``__init__`` of its own.
    """
    if part is None or getattr(part, "__init__", None) is nn.Module.__init__:
        return {}
    return inspect.signature(part).parameters


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    builder: Any = vars(part).get("__init__", part) if inspect.isclass(part) else part
    try:
        return get_type_hints(builder)
    except NameError:  # a name that is imported for type checkers only
        return {}


def _members(hint: Any) -> Iterator[Any]:
    """The types of a union, and the values of a literal as literals."""
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    elif get_origin(hint) is Literal:
        yield from (Literal[value] for value in get_args(hint))
    else:
        yield hint


def _all_plain(kinds: list[Any]) -> bool:
    return all(kind in PLAIN or get_origin(kind) is Literal for kind in kinds)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return repr(get_args(kind)[0])
    return "None" if kind is NoneType else f"of type {kind.__name__}"
