"""Module signatures, and validation of arguments against them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mmdet.registry import MODELS
from torch import nn

from damex.errors import ConfigError, did_you_mean

PLAIN = (bool, int, float, str, NoneType)


def module_class(module: Mapping[str, Any]) -> Any:
    """Return the class named by a module's ``type``, a registered name or the class."""
    kind = module.get("type")
    return MODELS.get(kind) if isinstance(kind, str) else kind


def parameters_of(module: Callable[..., Any] | None) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or builder, by name.

    Empty for None, and for a class that does not define ``__init__``.
    """
    if module is None or getattr(module, "__init__", None) is nn.Module.__init__:
        return {}
    return inspect.signature(module).parameters


def accepted(
    module: Callable[..., Any] | None, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return those of the values that a module accepts; all with ``**kwargs``."""
    parameters = parameters_of(module)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def check_arguments(
    module: Callable[..., Any], arguments: Mapping[str, Any], *, field: str
) -> None:
    """Reject unknown arguments, and values that do not match their type hint.

    Only numbers, strings, booleans, None and literals are checked. ``field`` is the
    place in the config, for instance ``moe.gate``.

    Raises:
        ConfigError: If an argument is unknown or has another type.
    """
    parameters = parameters_of(module)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = _hints(module)
    for name, value in arguments.items():
        if name not in parameters:
            if open_ended:
                continue
            raise ConfigError(
                f"{field}.{name} = {value!r} is no argument of {module.__name__}; "
                f"{did_you_mean(name, parameters)} What an inherited {field} sets goes "
                f"away with {field}._delete_=True."
            )
        allowed = list(_members(hints.get(name, Any)))
        if not _all_plain(allowed) or any(_fits(value, kind) for kind in allowed):
            continue
        kinds = " or ".join(_word(kind) for kind in allowed)
        raise ConfigError(f"{field}.{name} must be {kinds}, got {value!r}.")


def _hints(module: Callable[..., Any]) -> dict[str, Any]:
    is_class = inspect.isclass(module)
    builder: Any = vars(module).get("__init__", module) if is_class else module
    try:
        return get_type_hints(builder)
    except NameError:  # a name imported for type checkers only
        return {}


def _members(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, and the values of a literal as literals."""
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    elif get_origin(hint) is Literal:
        yield from (Literal[value] for value in get_args(hint))
    else:
        yield hint


def _all_plain(kinds: Sequence[Any]) -> bool:
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
