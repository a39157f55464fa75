"""Read the config inside a checkpoint as data, without executing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import mmdet.registry
import mmengine.registry
from mmengine.config.config import RESERVED_KEYS
from mmengine.registry import Registry

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


# Classes that execute config text, or unpickle or delete files that it names.
HARMFUL = (
    *("CameraMotionCompensation", "Detectron2Wrapper", "RFSearchHook"),
    *("OpenImagesDataset", "OpenImagesChallengeDataset", "RefCocoDataset"),
    *("CityScapesMetric", "MOTChallengeMetric"),
)
PICKLES = (".pkl", ".pickle", ".yaml", ".yml")  # mmengine's YAML builds any object, too
READ_BY_DAMEX = ("root", "train", "val", "test", "label_space")
# Keys that mmengine looks up in a registry, else imports.
LOOKED_UP = ("type", "constructor", "runner_type", "ema_type")
# The same for names that need not be in a registry.
ALSO_LOOKED_UP = ("_type", "_mode", "_policy", "_fn", "upsample")
UNREGISTERED = ("nms", "soft_nms", "norm", "value", "log_trace", "tb_trace")
# Keys with which mmengine reads a file, or imports a package.
LEADING_ELSEWHERE = ("_base_", "_scope_")


def check_types(value: Any, *, where: str) -> None:
    """Reject a config that names anything but registered classes.

    mmengine takes an unregistered ``type`` for an import path and calls it. ``where``
    is the origin of the config, for error messages.

    Raises:
        DataError: If building a value could run code.
    """
    if isinstance(value, list | tuple):
        for item in value:
            check_types(item, where=where)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if fault := _fault(key, item):
            raise DataError(
                f"the config in {where} has {key}={item!r:.80}, {fault}, and was not "
                "used: it could run code."
            )
        # albumentations has its own classes, and nothing else is looked up there.
        if not (key == "transforms" and value.get("type") == "Albu"):
            check_types(item, where=where)


def _fault(key: Any, item: Any) -> str | None:
    """How a config value could run code; None if it cannot."""
    if key in LEADING_ELSEWHERE:
        return "which reads another file or package"
    if key == "default_scope" and item not in ("mmdet", "mmengine", None):
        return "which imports a package"
    if key in LOOKED_UP and item in HARMFUL:
        return "which runs, unpickles or deletes what its config names"
    if key in LOOKED_UP and not _is_registered(item):
        return "which no registry has (a class of your own has to be imported first)"
    if not isinstance(item, str):
        return None
    if str(key).endswith(ALSO_LOOKED_UP) and "." in item:
        return "which could be any function"
    if key not in READ_BY_DAMEX and item.lower().endswith(PICKLES):
        return "a file that may be unpickled"
    return None


def _is_registered(name: Any) -> bool:
    """Whether a registry of mmengine or mmdet has a name."""
    if not isinstance(name, str):
        return False
    return name in UNREGISTERED or any(name in one.module_dict for one in _registries())


def _registries() -> Iterator[Registry]:
    """All registries, populated."""
    for package in (mmengine.registry, mmdet.registry):
        for one in vars(package).values():
            if isinstance(one, Registry):
                one.import_from_location()
                yield one
