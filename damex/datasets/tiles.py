"""Tiles: windows of images, for datasets whose objects are small.

A dataset with ``tile=N`` in its mixture entry is seen through windows of N x N pixels
of its images: random ones in training, all of them in evaluation, where detections are
merged. The pipeline resizes a window as it does whole images, so that objects look
larger by the ratio of their sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmcv.transforms import BaseTransform
from mmdet.registry import TRANSFORMS
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData
from torchvision.ops import batched_nms

from damex.errors import ConfigError

MERGE_IOU = 0.5  # of two detections of a class with a higher IoU, the better one stays
MIN_VISIBLE = 0.4  # smallest part of a box in a window that makes it a label
INSTANCES = ("pred_instances", "dataset_instances")  # fields of detections


def tiled(
    pipeline: Sequence[Any], side: int | str | None, *, test_mode: bool, where: str
) -> Sequence[Any]:
    """Return a pipeline that looks at windows, behind its steps that load.

    ConfigError if it has no such step, or ``side`` is not chosen yet.
    """
    if side is None:
        return pipeline
    if not isinstance(side, int):
        raise ConfigError(
            f"{where}: tile={side!r} belongs into the mixture of a config, which "
            "replaces it by a number; give the side of a window in pixels here."
        )
    loads = [number for number, step in enumerate(pipeline) if _loads(step)]
    if not loads:
        raise ConfigError(
            f"{where}: tile={side} crops images behind the steps of the pipeline that "
            "load them, such as dict(type='LoadImageFromFile'), and there are none."
        )
    # Boxes are scored in the whole image, so evaluation may load them later.
    place = 1 + (loads[0] if test_mode else loads[-1])
    crop = dict(
        type="RandomCrop",
        crop_size=(side, side),
        allow_negative_crop=True,  # most windows of evaluation have no object
        bbox_clip_border=False,
    )
    ignore = dict(type="IgnoreCutBoxes")
    steps = [dict(type="CropToWindow")] if test_mode else [crop, ignore]
    return [*pipeline[:place], *steps, *pipeline[place:]]


def _loads(step: Any) -> bool:
    kind = step.get("type") if isinstance(step, Mapping) else type(step)
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    return name.rpartition(".")[2].startswith("Load")


@TRANSFORMS.register_module()
class CropToWindow(BaseTransform):
    """Cut the ``window`` of a sample out of its image."""

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Change ``img`` and ``img_shape`` of mmdet's results, in place."""
        left, top, right, bottom = results["window"]
        results["img"] = results["img"][top:bottom, left:right]
        results["img_shape"] = results["img"].shape[:2]
        return results


@TRANSFORMS.register_module()
class IgnoreCutBoxes(BaseTransform):
    """Clip boxes to the image, and ignore those with too little area inside.

    It follows ``RandomCrop(bbox_clip_border=False)``, which only drops boxes that are
    outside. An ignored box is neither a label nor background, as COCO's ``iscrowd``.
    """

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Change ``gt_bboxes`` and ``gt_ignore_flags`` of mmdet's results, in place."""
        boxes = results["gt_bboxes"]
        needed = MIN_VISIBLE * boxes.areas
        boxes.clip_(results["img_shape"])
        results["gt_ignore_flags"] |= (boxes.areas < needed).numpy()
        return results


def joined(parts: Sequence[Any]) -> Any:
    """Return one data sample for the windows of an image, with boxes in the image.

    A sample without ``window`` is of the whole image. A single one keeps all of its
    detections. Of an object in the overlap of two windows, found twice, class-wise
    non-maximum suppression leaves the better box.
    """
    whole = parts[0].clone()
    for key in INSTANCES:
        if key not in whole:
            continue
        found = InstanceData.cat([_in_image(part, part.get(key)) for part in parts])
        if len(parts) > 1:
            fields = found.bboxes, found.scores, found.labels
            found = found[batched_nms(*fields, iou_threshold=MERGE_IOU)]
        whole.set_field(found, key)
    return whole


def joined_records(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As `joined`, for the data samples of many images as dicts, without ``window``."""
    images: dict[tuple[Any, ...], list[DetDataSample]] = {}
    for one in records:
        found = {key: InstanceData(**one[key]) for key in INSTANCES if key in one}
        meta = {key: one[key] for key in one.keys() - found}
        place = (one.get("dataset_name"), one["img_path"])
        images.setdefault(place, []).append(DetDataSample(metainfo=meta, **found))
    wholes = [joined(parts).to_dict() for parts in images.values()]
    return [{k: v for k, v in one.items() if k != "window"} for one in wholes]


def _in_image(sample: Any, found: Any) -> Any:
    """Return detections with boxes in pixels of the whole image."""
    left, top, *_ = sample.metainfo.get("window", (0, 0))
    found = found.clone()
    found.bboxes = found.bboxes + found.bboxes.new_tensor([left, top, left, top])
    return found
