"""Detectors of Hugging Face's Transformers, in mmdet's registry."""

from damex.hf import detector, weights  # noqa: F401 - both register what they have
