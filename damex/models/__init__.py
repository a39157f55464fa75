"""Glue between the experts of ``damex.moe`` and the detectors of mmdet."""

from damex.compat import ensure_ops

ops = ensure_ops().kind
if ops != "absent":
    from damex.compat.kernels import use_in_mmcv

    use_in_mmcv(is_compiled=ops == "compiled")
