"""Glue between the experts of ``damex.moe`` and the detectors of mmdet."""

from damex.compat import ensure_ops

ensure_ops()
