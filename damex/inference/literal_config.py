"""The config that travels in a checkpoint, read as data: no line of it is run."""

from __future__ import annotations

import ast
from typing import Any

from damex.errors import DataError


def read_literals(text: str, *, where: str) -> dict[str, Any]:
    """Read the assignments of a config as mmengine writes it.

    Such a text holds nothing but names, and for each of them numbers, texts, None,
    truth values, lists, tuples, dicts and ``dict(...)`` of these. Checkpoints come from
    strangers, and their config is a Python program to mmengine.

    Args:
        text: Python text.
        where: What it is from, for the message.

    Raises:
        DataError: If it is anything else.
    """
    try:
        lines = ast.parse(text).body
        found = {}
        for line in lines:
            if not isinstance(line, ast.Assign) or len(line.targets) != 1:
                raise _NoValueError(line)
            (target,) = line.targets
            if not isinstance(target, ast.Name):
                raise _NoValueError(line)
            found[target.id] = _value(line.value)
    except _NoValueError as refusal:
        raise DataError(
            f"the config in {where} is more than values, and was not read: line "
            f"{refusal.line}. It could run code; damex writes none of this kind."
        ) from refusal
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"the config in {where} cannot be read ({type(error).__name__})."
        ) from error
    return found


class _NoValueError(Exception):
    """Something that is no value."""

    def __init__(self, node: Any) -> None:
        super().__init__()
        self.line: int = node.lineno


def _value(node: ast.expr) -> Any:
    """The value of an expression without names and calls, but for ``dict``."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    if isinstance(node, ast.Dict):
        if None in node.keys:  # {**other}
            raise _NoValueError(node)
        keys = [_value(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.Call):
        return _dict_call(node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if isinstance(number, int | float):
            return -number
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    raise _NoValueError(node)


def _dict_call(node: ast.Call) -> dict[str, Any]:
    """``dict(key=value)``, or ``dict({...})`` where a key is no word of Python."""
    is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict"
    if not is_dict or not all(isinstance(one, ast.Dict) for one in node.args):
        raise _NoValueError(node)
    found: dict[str, Any] = {}
    for one in node.args:
        found |= _value(one)
    for keyword in node.keywords:
        if keyword.arg is None:  # **other
            raise _NoValueError(node)
        found[keyword.arg] = _value(keyword.value)
    return found


def check_types(value: Any, *, where: str) -> None:
    """Refuse a config whose parts are not named as classes in a registry are.

    mmengine takes a ``type`` with a dot for a place in any package, imports it and
    calls it with what stands beside.

    Args:
        value: A config, or a part of one.
        where: What it is from, for the message.

    Raises:
        DataError: If such a ``type``, or a ``_scope_``, stands anywhere in it.
    """
    if isinstance(value, list | tuple):
        for item in value:
            check_types(item, where=where)
    if not isinstance(value, dict):
        return
    kind = value.get("type", "")
    if not isinstance(kind, str) or "." in kind or "_scope_" in value:
        raise DataError(
            f"the config in {where} names type={kind!r}, which need not be a class of "
            "a detector, and was not used: it could run code."
        )
    for item in value.values():
        check_types(item, where=where)
