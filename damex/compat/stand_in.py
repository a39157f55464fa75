"""The module that takes the place of mmcv's compiled ops."""

from __future__ import annotations

from collections.abc import Callable
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

PROVIDED: dict[str, str] = {
    "get_compiler_version": "info",
    "get_compiling_cuda_version": "info",
    "ms_deform_attn_backward": "deform_attn",
    "ms_deform_attn_forward": "deform_attn",
    "nms": "nms",
    "roi_align_backward": "roi_align",
    "roi_align_forward": "roi_align",
    "sigmoid_focal_loss_backward": "focal_loss",
    "sigmoid_focal_loss_forward": "focal_loss",
    "softnms": "nms",
}
"""Ops with a torch version, and the file of ``damex.compat.kernels`` it is in."""


class StandInOps(ModuleType):
    """Answers for every op: with a torch version, or with an error when called.

    mmcv asks for all its op names while it is imported, so a name must always
    resolve; only a call can tell that an op is really needed.

    Attributes:
        reason: Why the compiled ops are not in use.
    """

    reason: str

    def __init__(self, reason: str) -> None:
        super().__init__(EXTENSION, "Stand-in of damex for mmcv's compiled ops.")
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
        if name in PROVIDED:
            return partial(_call_kernel, name)
        return partial(_refuse, name)


def _call_kernel(name: str, *args: Any, **kwargs: Any) -> Any:
    kernels = import_module(f"damex.compat.kernels.{PROVIDED[name]}")
    return getattr(kernels, name)(*args, **kwargs)


def _refuse(name: str, *args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError(
        f"mmcv op {name!r} was called, but mmcv was installed without compiled ops "
        "and damex has no torch version of this op. Either choose a model without "
        f"it, or compile the ops (minutes; needs a C++ compiler): {COMPILE_COMMAND}"
    )
