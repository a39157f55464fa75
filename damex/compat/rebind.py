"""Repairs modules of mmdet and mmcv imported before the ops were there.

Such a module looks like ``try: from mmcv.ops import batched_nms`` with a fallback
that raises. Once imported it keeps the fallback, whatever mmcv can do later.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

USERS = ("mmdet.", "mmcv.cnn.")
"""Prefixes of the modules that import mmcv ops with a fallback."""


def rebind_fallbacks() -> tuple[str, ...]:
    """Gives imported modules the mmcv ops that they failed to import.

    Returns:
        The names put right, as ``module.name``, sorted.
    """
    early = [module for name, module in sys.modules.items() if name.startswith(USERS)]
    rebound = []
    for module in early:
        for source, name, bound_as in _guarded_imports(module):
            op = getattr(import_module(source), name, None)
            # An op that this mmcv does not have keeps its fallback.
            if op is not None and getattr(module, bound_as, None) is not op:
                setattr(module, bound_as, op)
                rebound.append(f"{module.__name__}.{bound_as}")
    return tuple(sorted(rebound))


def _guarded_imports(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Yields source, name and bound name of mmcv ops imported in a try block."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return  # no source to read, so none with such a block
    guarded = [
        line for node in tree.body if isinstance(node, ast.Try) for line in node.body
    ]
    for node in guarded:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "mmcv.ops"
        ):
            for alias in node.names:
                yield str(node.module), alias.name, alias.asname or alias.name
