"""Make ``import mmdet.models`` work with and without mmcv's compiled ops."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from typing import Literal

from damex.compat.mmcv_ext import EXTENSION, KERNELS, OpsStub, rebind_fallbacks

__all__ = ["OpsReport", "ensure_ops"]


@dataclass(frozen=True)
class OpsReport:
    """The mmcv ops in use.

    Attributes:
        kind: ``compiled``, ``stub``, or ``absent`` without mmcv.
        reason: Why it is not ``compiled``; empty if it is.
        rebound: Names that this call fixed in modules imported too early.
    """

    kind: Literal["compiled", "stub", "absent"]
    reason: str = ""
    rebound: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return one line for the log."""
        if self.kind == "compiled":
            return "mmcv ops: compiled"
        if self.kind == "absent":
            return f"mmcv ops: absent ({self.reason})"
        ops = {k.removesuffix("_forward").removesuffix("_backward") for k in KERNELS}
        return f"mmcv ops: torch versions of {', '.join(sorted(ops))} ({self.reason})"


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
    return _choose(package)


def _choose(package: ModuleSpec) -> OpsReport:
    """Try the compiled ops of an installed mmcv, else use the stub."""
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
    return OpsReport("stub", reason, rebind_fallbacks())
