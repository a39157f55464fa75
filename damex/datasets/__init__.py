"""Mixtures of detection datasets: label space, sampler and data checks."""

from damex.compat import ensure_ops

ensure_ops()
