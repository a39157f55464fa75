"""Crops of images for training; configs name this module in ``custom_imports``."""

from __future__ import annotations

from typing import Any

from mmcv.transforms import BaseTransform
from mmdet.registry import TRANSFORMS


@TRANSFORMS.register_module()
class IgnoreCutBoxes(BaseTransform):
    """Clip boxes to the image, and ignore those of which too little is inside.

    It follows ``RandomCrop(bbox_clip_border=False)``, which only drops boxes that are
    outside. An ignored box is neither a label nor background, as COCO's ``iscrowd``.

    Args:
        min_visible: Smallest part of the area of a box that makes it a label.
    """

    def __init__(self, *, min_visible: float) -> None:
        self.min_visible = min_visible

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Change ``gt_bboxes`` and ``gt_ignore_flags`` of mmdet's results, in place."""
        boxes = results["gt_bboxes"]
        needed = self.min_visible * boxes.areas
        boxes.clip_(results["img_shape"])
        results["gt_ignore_flags"] |= (boxes.areas < needed).numpy()
        return results
