"""Lets mmdet run where mmcv was installed without compiled ops."""

from damex.compat.ops import OpsReport, ensure_ops

__all__ = ["OpsReport", "ensure_ops"]
