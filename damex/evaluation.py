"""COCO average precision of one dataset, from boxes in memory."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mmdet.registry import METRICS
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log

from damex.datasets.label_space import LabelSpace
from damex.errors import ConfigError, DataError

__all__ = [
    "COCO_BACKENDS",
    "ImageResult",
    "MixtureMetric",
    "coco_scores",
    "default_backend",
]

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


@METRICS.register_module()
class MixtureMetric(BaseMetric):
    """Average precision per dataset, and where each dataset's tokens went.

    Every sample is stored once, with the dataset it comes from; image ids of different
    datasets never meet. Detections are restricted to the classes that the image's
    dataset annotates.

    Keys: ``<dataset>/AP``, ``<dataset>/AP50`` and so on, ``<dataset>/images``,
    ``<dataset>/boxes``, ``mean/AP``, ``mean/AP50`` (plain mean over datasets, as in the
    DAMEX paper), and for a detector with experts ``<dataset>/own_share`` and
    ``mean/own_share``: the share of tokens in MoE layers whose first expert belongs to
    the dataset's group; ``mean/busiest_share``: the share of all tokens that the
    busiest expert of a layer is the first expert of, mean over layers (1/E is even).

    Args:
        backend: ``faster_coco_eval`` or ``pycocotools``; the first one installed by
            default.
        collect_device: As for every mmengine metric.
    """

    default_prefix = "mixture"

    def __init__(
        self, *, backend: str | None = None, collect_device: str = "cpu"
    ) -> None:
        super().__init__(collect_device=collect_device)
        self.backend = backend

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Store one batch of predictions with their ground truth.

        Raises:
            ConfigError: If a sample does not come from a MixtureDataset.
            DataError: If the detector gives scores that are not finite.
        """
        for sample in data_samples:
            if "dataset_id" not in sample:
                raise ConfigError(
                    "MixtureMetric met a sample without dataset_id; use it with a "
                    "dataset of type='MixtureDataset' in val_dataloader and "
                    "test_dataloader."
                )
            predicted = sample["pred_instances"]
            if not torch.isfinite(predicted["scores"]).all():
                raise DataError(
                    f"the detector gives scores that are not numbers on an image of "
                    f"dataset {sample['dataset_name']!r}; did the training diverge? "
                    "Look at the loss in the log, and try a lower learning rate."
                )
            height, width = sample["ori_shape"][:2]
            result = ImageResult(
                width=int(width),
                height=int(height),
                boxes=predicted["bboxes"].cpu().numpy(),
                scores=predicted["scores"].cpu().numpy(),
                labels=predicted["labels"].cpu().numpy(),
                ground_truth=sample["ground_truth"],
            )
            counts = sample.get("routing_counts") or {}
            tokens_LE = np.array(list(counts.values())) if counts else None
            groups = sample.get("group_experts")
            self.results.append((sample["dataset_id"], result, tokens_LE, groups))

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Scores of every dataset that has samples, and their means."""
        space = LabelSpace.from_metainfo(self.dataset_meta)
        scores: dict[str, float] = {}
        for dataset_id, name in enumerate(space.dataset_names):
            rows = [row for row in results if row[0] == dataset_id]
            if not rows:
                continue
            images = [row[1] for row in rows]
            found = coco_scores(
                images,
                classes={i: space.classes[i] for i in space.valid_labels(dataset_id)},
                backend=self.backend,
            )
            found["images"] = len(images)
            found["boxes"] = sum(len(image.ground_truth) for image in images)
            share = _own_share([row[2:] for row in rows], space.group_id(dataset_id))
            if share is not None:
                found["own_share"] = share
            scores.update({f"{name}/{key}": value for key, value in found.items()})
        scores.update(_means(scores))
        tokens_SLE = [row[2] for row in results if row[2] is not None]
        if tokens_SLE:
            scores["mean/busiest_share"] = _busiest_share(np.sum(tokens_SLE, axis=0))
        print_log(str(scores), logger="current", level=logging.INFO)
        return scores


def _own_share(
    routed: Sequence[tuple[np.ndarray | None, Sequence[Sequence[int]] | None]],
    group: int,
) -> float | None:
    """Share of a dataset's tokens that its own group's experts take.

    Args:
        routed: Token counts (layers, experts) of each image, and the experts of each
            group; None where they are unknown.
        group: That of the dataset.
    """
    own, total, is_known = 0, 0, False
    for tokens_LE, groups in routed:
        if tokens_LE is not None and groups is not None:
            own += tokens_LE[:, list(groups[group])].sum()
            total += tokens_LE.sum()
            is_known = True
    return float(own / max(total, 1)) if is_known else None


def _busiest_share(tokens_LE: np.ndarray) -> float:
    """Tokens of the busiest expert over all tokens, mean over layers."""
    tokens_L = np.maximum(tokens_LE.sum(1), 1)
    return float((tokens_LE.max(1) / tokens_L).mean())


def _means(scores: Mapping[str, float]) -> dict[str, float]:
    """Plain mean over datasets of AP, AP50, AP75 and own_share."""
    columns: dict[str, list[float]] = {}
    for key, value in scores.items():
        columns.setdefault(key.rsplit("/", 1)[1], []).append(value)
    return {
        f"mean/{key}": float(np.nanmean(columns[key]))
        for key in ("AP", "AP50", "AP75", "own_share")
        if key in columns and not np.all(np.isnan(columns[key]))
    }
