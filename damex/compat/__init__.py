"""Make ``import mmdet.models`` work with and without mmcv's compiled ops.

Without them, a stub takes the place of the extension module, and modules imported
before it are repaired.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

__all__ = ["OpsReport", "ensure_ops", "import_mmdet"]

EXTENSION = "mmcv._ext"
# Builds mmcv for the installed torch; pip would otherwise build it without one.
COMPILE_COMMAND = (
    "pip install --force-reinstall --no-deps --no-build-isolation --no-cache-dir "
    "--no-binary onedl-mmcv onedl-mmcv"
)
# Ops with a torch version in `damex.compat.kernels`, most as _forward and _backward.
OPS = ("nms", "roi_align", "sigmoid_focal_loss")
# Prefixes of the modules that import mmcv ops with a fallback.
USERS = ("mmdet.", "mmcv.cnn.")


@dataclass(frozen=True)
class OpsReport:
    """The mmcv ops in use, and why they are not ``compiled``."""

    kind: Literal["compiled", "stub", "absent"]
    reason: str = ""

    def summary(self) -> str:
        """Return one line for the log."""
        if self.kind != "stub":
            return f"mmcv ops: {self.kind}" + f" ({self.reason})" * bool(self.reason)
        return f"mmcv ops: torch versions of {', '.join(OPS)} ({self.reason})"


def import_mmdet() -> None:
    """Import mmdet with the ops in place, without the lines that it prints."""
    ensure_ops()
    # Twice: an optional package is missing.
    with contextlib.redirect_stdout(io.StringIO()):
        import_module("mmdet.datasets")


def ensure_ops() -> OpsReport:
    """Install the stub unless the compiled ops can be imported.

    Call it before mmdet is imported; further calls have no effect. Neither mmcv nor
    torch is imported if mmcv has no compiled ops.
    """
    present = sys.modules.get(EXTENSION)
    if isinstance(present, OpsStub):
        return OpsReport("stub", present.reason)
    if present is not None:
        return OpsReport("compiled")
    try:
        package = find_spec("mmcv")
    except ModuleNotFoundError:  # an import hook that forbids mmcv
        package = None
    if package is None:
        return OpsReport("absent", "mmcv is not installed")
    where = package.submodule_search_locations
    if PathFinder.find_spec("mmcv.ops", where) is None:
        return OpsReport("absent", "mmcv-lite has no mmcv.ops")
    # Looking for the file first avoids importing mmcv and torch.
    if PathFinder.find_spec(EXTENSION, where) is None:
        return _use_stub("mmcv was installed without compiled ops")
    try:
        import_module(EXTENSION)
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        return _use_stub(f"mmcv's compiled ops do not load: {error}")
    return OpsReport("compiled")


def _use_stub(reason: str) -> OpsReport:
    sys.modules[EXTENSION] = OpsStub(reason)
    rebind_fallbacks()
    return OpsReport("stub", reason)


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
        if name in ("get_compiler_version", "get_compiling_cuda_version"):
            return lambda: "not compiled (stub of damex)"
        return partial(_call, name)


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    if name.removesuffix("_forward").removesuffix("_backward") in OPS:
        return getattr(import_module("damex.compat.kernels"), name)(*args, **kwargs)
    raise RuntimeError(
        f"mmcv op {name!r} was called, but mmcv was installed without compiled ops "
        "and damex has no torch version of this op. Either choose a model without "
        f"it, or compile the ops (minutes; needs a C++ compiler): {COMPILE_COMMAND}"
    )


def rebind_fallbacks() -> None:
    """Give modules that were imported too early the mmcv ops that they lack.

    A module of mmdet or mmcv with ``try: from mmcv.ops import batched_nms`` keeps its
    raising fallback once imported.
    """
    early = [module for name, module in sys.modules.items() if name.startswith(USERS)]
    for module in early:
        try:
            tree = ast.parse(inspect.getsource(module))
        except (OSError, TypeError):
            continue  # no source to parse
        tries = [node for node in tree.body if isinstance(node, ast.Try)]
        for node in (statement for one in tries for statement in one.body):
            source = str(getattr(node, "module", ""))
            if isinstance(node, ast.ImportFrom) and source.startswith("mmcv.ops"):
                for alias in node.names:
                    op = getattr(import_module(source), alias.name, None)
                    if op is not None:  # in this mmcv
                        setattr(module, alias.asname or alias.name, op)
