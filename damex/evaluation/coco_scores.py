"""COCO average precision of one dataset, from boxes in memory."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["COCO_BACKENDS", "ImageResult", "coco_scores", "default_backend"]

COCO_BACKENDS = ("faster_coco_eval", "pycocotools")
SCORE_NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")


@dataclass(frozen=True)
class ImageResult:
    """Detections and ground truth of one image.

    Args:
        width: Pixels.
        height: Pixels.
        boxes: (n, 4) as x1, y1, x2, y2 in pixels of the original image.
        scores: (n,) confidences.
        labels: (n,) mixture labels.
        ground_truth: ``bbox`` (x, y, width, height), ``label``, ``area``, ``iscrowd``.
    """

    width: int
    height: int
    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    ground_truth: Sequence[Mapping[str, Any]]


def default_backend() -> str:
    """``faster_coco_eval`` where it is installed, else ``pycocotools``."""
    try:
        import faster_coco_eval  # noqa: F401
    except ImportError:
        return "pycocotools"
    return "faster_coco_eval"


def coco_scores(
    images: Sequence[ImageResult],
    *,
    classes: Mapping[int, str],
    backend: str | None = None,
) -> dict[str, float]:
    """Evaluate one dataset by the COCO protocol.

    Only detections of the given classes count, as if the detector knew no other.

    Args:
        images: One result per image.
        classes: Mixture labels that the dataset annotates, with their names.
        backend: One of ``COCO_BACKENDS``; both give the same numbers.

    Returns:
        AP, AP50, AP75 and AP by object size, in [0, 1]; nan where there is no object
        to find.

    Raises:
        ValueError: If the backend is unknown.
    """
    backend = backend or default_backend()
    coco_class, eval_class = _load(backend)
    labels = sorted(classes)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco_class()
        truth.dataset = _document(images, classes)
        truth.createIndex()
        if not truth.dataset["annotations"]:
            return dict.fromkeys(SCORE_NAMES, float("nan"))
        rows = _detections(images, np.asarray(labels))
        found = truth.loadRes(rows) if rows else coco_class()
        evaluation = eval_class(truth, found, "bbox")
        evaluation.params.catIds = [label + 1 for label in labels]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    stats = [float(value) for value in evaluation.stats[:6]]
    return {
        name: value if value >= 0 else float("nan")
        for name, value in zip(SCORE_NAMES, stats, strict=True)
    }


def _load(backend: str) -> tuple[Any, Any]:
    """The COCO and COCOeval classes of a backend."""
    if backend == "faster_coco_eval":
        from faster_coco_eval import COCO, COCOeval_faster

        return COCO, COCOeval_faster
    if backend == "pycocotools":
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        return COCO, COCOeval
    raise ValueError(f"backend must be one of {COCO_BACKENDS}, got {backend!r}.")


def _document(
    images: Sequence[ImageResult], classes: Mapping[int, str]
) -> dict[str, Any]:
    """Ground truth as a COCO document; image ids are positions, from 1."""
    records: list[dict[str, Any]] = []
    for image_id, image in enumerate(images, start=1):
        for truth in image.ground_truth:
            if truth["label"] in classes:
                records.append(
                    dict(
                        id=len(records) + 1,
                        image_id=image_id,
                        category_id=int(truth["label"]) + 1,
                        bbox=list(truth["bbox"]),
                        area=truth["area"],
                        iscrowd=truth["iscrowd"],
                        ignore=0,
                    )
                )
    return dict(
        info={},
        images=[
            dict(id=i, width=image.width, height=image.height)
            for i, image in enumerate(images, start=1)
        ],
        annotations=records,
        categories=[dict(id=k + 1, name=name) for k, name in sorted(classes.items())],
    )


def _detections(
    images: Sequence[ImageResult], labels: np.ndarray
) -> list[dict[str, Any]]:
    """Detections of the given labels in COCO's result format."""
    rows = []
    for image_id, image in enumerate(images, start=1):
        keep = np.isin(image.labels, labels)
        boxes = image.boxes[keep].astype(float)
        boxes[:, 2:] -= boxes[:, :2]
        for box, score, label in zip(
            boxes.tolist(), image.scores[keep], image.labels[keep], strict=True
        ):
            rows.append(
                dict(
                    image_id=image_id,
                    category_id=int(label) + 1,
                    bbox=box,
                    score=float(score),
                )
            )
    return rows
