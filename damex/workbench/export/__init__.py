"""Detectors for other programs: plain mmdet of one dataset, and ONNX."""
