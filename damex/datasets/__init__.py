"""Mixtures of detection datasets: one label space, one sampler, checked files."""

from damex.compat import ensure_ops

ensure_ops()
