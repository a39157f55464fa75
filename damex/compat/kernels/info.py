"""What mmcv prints about its build when it collects the environment."""

from __future__ import annotations

NOT_COMPILED = "not compiled (damex stand-in)"


def get_compiler_version() -> str:
    """Names the compiler of mmcv's ops: there is none."""
    return NOT_COMPILED


def get_compiling_cuda_version() -> str:
    """Names the CUDA version of mmcv's ops: there is none."""
    return NOT_COMPILED
