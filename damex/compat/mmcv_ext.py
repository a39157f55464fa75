"""Stub for mmcv's compiled ops, and repair of modules imported before it."""

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
    """Module that resolves every op to a torch version, or to an error when called.

    mmcv looks up all its op names on import, so every name must resolve.
    """

    reason: str

    def __init__(self, reason: str) -> None:
        super().__init__(EXTENSION, "Stub of damex for mmcv's compiled ops.")
        self.reason = reason
        # Without a loader, mmcv.utils.check_ops_exist reports missing ops.
        self.__spec__ = ModuleSpec(EXTENSION, loader=None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the op of that name; torch is imported on the first call."""
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
    """Give modules that were imported too early the mmcv ops that they lack.

    A module of mmdet or mmcv with ``try: from mmcv.ops import batched_nms`` keeps its
    raising fallback once imported. Returns the fixed names, ``module.name``, sorted.
    """
    early = [module for name, module in sys.modules.items() if name.startswith(USERS)]
    rebound = []
    for module in early:
        for source, name, bound_as in _guarded_imports(module):
            op = getattr(import_module(source), name, None)
            # Ops missing in this mmcv keep their fallback.
            if op is not None and getattr(module, bound_as, None) is not op:
                setattr(module, bound_as, op)
                rebound.append(f"{module.__name__}.{bound_as}")
    return tuple(sorted(rebound))


def _guarded_imports(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Yield source, name and bound name of mmcv ops imported in a try block."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return  # no source to parse
    guarded = [
        line for node in tree.body if isinstance(node, ast.Try) for line in node.body
    ]
    for node in guarded:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "mmcv.ops"
        ):
            for alias in node.names:
                yield str(node.module), alias.name, alias.asname or alias.name
