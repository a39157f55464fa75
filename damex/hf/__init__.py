"""Detectors of Hugging Face's Transformers, in mmdet's registry."""

from damex.hf import detector  # noqa: F401 - registers its classes
