"""The stub in the place of mmcv's compiled ops, and modules that came before it."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

EXTENSION = "mmcv._ext"

COMPILE_COMMAND = (
    "pip install --force-reinstall --no-deps --no-build-isolation --no-cache-dir "
    "--no-binary onedl-mmcv onedl-mmcv"
)
"""Builds mmcv beside the installed torch; pip would else build it without one."""

KERNELS = (
    "ms_deform_attn_backward",
    "ms_deform_attn_forward",
    "nms",
    "roi_align_backward",
    "roi_align_forward",
    "sigmoid_focal_loss_backward",
    "sigmoid_focal_loss_forward",
    "softnms",
)
"""Ops with a torch version, which ``damex.compat.kernels`` has under the same name."""

BUILD_INFO = ("get_compiler_version", "get_compiling_cuda_version")
"""What mmcv asks about its build when it collects the environment."""

USERS = ("mmdet.", "mmcv.cnn.")
"""Prefixes of the modules that import mmcv ops with a fallback."""


class OpsStub(ModuleType):
    """Answers for every op: with a torch version, or with an error when called.

    mmcv asks for all its op names while it is imported, so a name must always
    resolve; only a call can tell that an op is really needed.

    Attributes:
        reason: Why the compiled ops are not in use.
    """

    reason: str

    def __init__(self, reason: str) -> None:
        super().__init__(EXTENSION, "Stub of damex for mmcv's compiled ops.")
        self.reason = reason
        # No loader: mmcv.utils.check_ops_exist then truly says that there are none.
        self.__spec__ = ModuleSpec(EXTENSION, loader=None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns the op of that name; torch is imported when it is first called.

        Raises:
            AttributeError: For names with two leading underscores, which Python
                itself asks for.
        """
        if name.startswith("__"):
            raise AttributeError(f"module {EXTENSION!r} has no attribute {name!r}")
        if name in BUILD_INFO:
            return lambda: "not compiled (stub of damex)"
        return partial(_call_kernel if name in KERNELS else _refuse, name)


def _call_kernel(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(import_module("damex.compat.kernels"), name)(*args, **kwargs)


def _refuse(name: str, *args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError(
        f"mmcv op {name!r} was called, but mmcv was installed without compiled ops "
        "and damex has no torch version of this op. Either choose a model without "
        f"it, or compile the ops (minutes; needs a C++ compiler): {COMPILE_COMMAND}"
    )


def rebind_fallbacks() -> tuple[str, ...]:
    """Gives modules that were imported too early the mmcv ops they had to miss.

    Such a module of mmdet or mmcv looks like ``try: from mmcv.ops import batched_nms``
    with a fallback that raises. Once imported it keeps the fallback, whatever mmcv can
    do later.

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
