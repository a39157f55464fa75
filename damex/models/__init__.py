"""Glue between the experts of ``damex.moe`` and the detectors of mmdet."""
