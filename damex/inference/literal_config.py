"""Read the config inside a checkpoint as data, without executing it."""

from __future__ import annotations

import ast
from typing import Any

from mmengine.config.config import RESERVED_KEYS

from damex.errors import DataError


def read_literals(text: str, *, where: str) -> dict[str, Any]:
    """Read the assignments of a config dumped by mmengine: literals and ``dict(...)``.

    Checkpoints can be untrusted, and mmengine would execute their config. ``where`` is
    the origin of the text, for error messages.

    Raises:
        DataError: If the text contains anything else.
    """
    found, line = {}, 0
    try:
        for statement in ast.parse(text).body:
            line = statement.lineno
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    if name in RESERVED_KEYS:
                        raise ValueError(name)
                    found[name] = ast.literal_eval(_Literal().visit(statement.value))
                case _:
                    raise ValueError(type(statement).__name__)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        fault = f"cannot be read ({type(error).__name__})."
        if line:
            fault = (
                f"is more than values, and was not read: line {line}. It could run "
                "code; damex writes none of this kind."
            )
        raise DataError(f"the config in {where} {fault}") from error
    return found


class _Literal(ast.NodeTransformer):
    """Make ``dict(key=value)``, ``dict({...})``, ``inf`` and ``nan`` literals."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict"
        if not is_dict or not all(keyword.arg for keyword in node.keywords):
            return node
        keys: list[ast.expr | None] = []
        values: list[ast.expr] = []
        for one in node.args:
            if not isinstance(one, ast.Dict):
                return node
            keys += one.keys
            values += one.values
        keys += [ast.Constant(keyword.arg) for keyword in node.keywords]
        values += [keyword.value for keyword in node.keywords]
        return ast.copy_location(ast.Dict(keys, values), node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in ("inf", "nan"):
            return ast.copy_location(ast.Constant(float(node.id)), node)
        return node

    def visit_Set(self, node: ast.Set) -> ast.AST:
        raise ValueError("set")  # which mmengine does not write
