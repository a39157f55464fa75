"""COCO average precision of a mixture: per dataset, and pooled."""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from mmdet.registry import METRICS
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from torchvision.ops import batched_nms

from damex.datasets.label_space import LabelSpace
from damex.datasets.tiles import MERGE_IOU
from damex.datasets.windows import Window
from damex.errors import ConfigError, DataError, check_sizes

COCO_BACKENDS = ("faster_coco_eval", "pycocotools")
MAX_DETS = 100  # of each class in an image, as in COCO
SCORE_NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")


@dataclass(frozen=True)
class ImageResult:
    """Detections and ground truth of one image, in pixels of the original image.

    Args:
        boxes: (n, 4) as x1, y1, x2, y2.
        scores: (n,) confidences.
        labels: (n,) mixture labels.
        ground_truth: ``bbox`` (x, y, width, height), ``label``, ``area``, ``iscrowd``.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    ground_truth: Sequence[Mapping[str, Any]]


def coco_scores(
    images: Sequence[ImageResult],
    *,
    classes: Mapping[int, str],
    backend: str | None = None,
    classwise: bool = False,
    max_dets: int = MAX_DETS,
) -> dict[str, float]:
    """Evaluate one dataset by the COCO protocol; nan for scores without any object.

    With `classwise`, ``AP_class_<label>`` is the AP of each class.

    Only detections of `classes` count: the mixture labels that the dataset annotates,
    with their names. Of each class in an image, the `max_dets` best count. Of equal
    scores, the first counts first, so pass the images in the order of their COCO ids.
    Both backends give the same numbers, in [0, 1].
    """
    coco_class, eval_class = _load(backend)
    labels = sorted(classes)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco_class()
        truth.dataset = _document(images, classes)
        truth.createIndex()
        by_class = [f"AP_class_{label}" for label in labels if classwise]
        if not truth.dataset["annotations"]:
            return dict.fromkeys((*SCORE_NAMES, *by_class), float("nan"))
        rows = _detections(images, np.asarray(labels))
        found = truth.loadRes(rows) if len(rows) else coco_class()
        evaluation = eval_class(truth, found, "bbox")
        evaluation.params.catIds = [label + 1 for label in labels]
        evaluation.params.maxDets = [1, max_dets] if max_dets > 1 else [1]
        evaluation.evaluate()
        evaluation.accumulate()
    # IoU thresholds, recalls, classes, object sizes; of max_dets detections. (The
    # summary of pycocotools knows no other limit than 100.)
    precision_TRKA = np.asarray(evaluation.eval["precision"])[..., -1]
    half, three_quarters = 0, 5  # thresholds are 0.50, 0.55, ..., 0.95
    all_TRK = precision_TRKA[..., 0]
    parts = [all_TRK, all_TRK[half], all_TRK[three_quarters]]
    parts += [precision_TRKA[..., size] for size in (1, 2, 3)]
    parts += [all_TRK[..., number] for number in range(len(by_class))]
    names = (*SCORE_NAMES, *by_class)
    return {name: _mean(part) for name, part in zip(names, parts, strict=True)}


def _mean(precision: np.ndarray) -> float:
    """Mean of the known precisions, else nan; -1 marks unknown ones."""
    known = precision[precision >= 0]
    return float(known.mean()) if known.size else float("nan")


def _load(backend: str | None) -> tuple[Any, Any]:
    """The COCO and COCOeval classes of a backend; by default the faster ones."""
    if backend not in (None, *COCO_BACKENDS):
        raise ValueError(f"backend must be one of {COCO_BACKENDS}, got {backend!r}.")
    if backend == "pycocotools":
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        return COCO, COCOeval
    from faster_coco_eval import COCO, COCOeval_faster

    return COCO, COCOeval_faster


def _document(
    images: Sequence[ImageResult], classes: Mapping[int, str]
) -> dict[str, Any]:
    """Ground truth as a COCO document; image ids are positions, from 1."""
    records = [
        dict(
            image_id=image_id,
            category_id=int(truth["label"]) + 1,
            bbox=list(truth["bbox"]),
            area=truth["area"],
            iscrowd=truth["iscrowd"],
            ignore=0,
        )
        for image_id, image in enumerate(images, start=1)
        for truth in image.ground_truth
        if truth["label"] in classes
    ]
    return dict(
        info={},
        images=[dict(id=i) for i, _ in enumerate(images, start=1)],
        annotations=[dict(record, id=i) for i, record in enumerate(records, start=1)],
        categories=[dict(id=k + 1, name=name) for k, name in sorted(classes.items())],
    )


def _detections(images: Sequence[ImageResult], labels: np.ndarray) -> np.ndarray:
    """Detections of the given labels: image id, x, y, w, h, score, category id."""
    rows = []
    for image_id, image in enumerate(images, start=1):
        keep = np.isin(image.labels, labels)
        boxes = image.boxes[keep].astype(float)
        boxes[:, 2:] -= boxes[:, :2]
        ids = np.full(len(boxes), image_id)
        columns = (ids, boxes, image.scores[keep], image.labels[keep] + 1)
        rows.append(np.column_stack(columns))
    return np.concatenate(rows)


@dataclass(frozen=True)
class _Row:
    """The contribution of one image, with detections of its dataset's or all classes.

    ``tokens_LE`` are tokens per layer by their first expert, None without experts;
    ``group_experts`` the experts of each group, None if groups share all of them.
    ``window`` is the part of the image, None for all of it, and ``number`` that of the
    image in its dataset, as several files may use an id.
    """

    dataset_id: int
    image_id: Any
    of_dataset: ImageResult
    of_all: ImageResult
    tokens_LE: np.ndarray | None
    group_experts: Sequence[Sequence[int]] | None
    window: Window | None = None
    number: int = 0

    @property
    def place(self) -> tuple[int, bool, Any, int]:
        """COCO evaluates the images of a dataset by id; that decides equal scores."""
        is_text = isinstance(self.image_id, str)
        return self.dataset_id, is_text, self.image_id, self.number


@METRICS.register_module()
class MixtureMetric(BaseMetric):
    """Average precision per dataset and pooled, and routing statistics.

    Each sample is stored once, with its dataset; image ids of different datasets do not
    clash. One pass of the detector gives two kinds of scores:

    ``<dataset>/AP``: the dataset is known. Only classes that it annotates count, and a
    detector of damex selects its detections among them (``dataset_instances``), or,
    without `dataset_known`, among all classes.

    ``pooled/AP``: the dataset is unknown. All images and classes are one dataset, and a
    detection of a class that the image's dataset does not annotate is a false positive.

    Keys: ``AP``, ``AP50``, ``AP75``, AP by object size, ``images`` and ``boxes`` of
    every dataset and of ``pooled``; ``mean/AP``, ``mean/AP50``, ``mean/AP75`` (plain
    mean over datasets, as in the DAMEX paper). With experts,
    ``<dataset>/routing_accuracy`` and ``mean/routing_accuracy``: the fraction of tokens
    in MoE layers whose first expert belongs to the dataset's group; ``mean/max_load``:
    the fraction of tokens whose first expert is the busiest one of a layer, mean over
    layers (1/E is balanced).

    With `classwise` also ``<dataset>/AP_class_<label>``, and
    ``<dataset>/confusion_<group>``: the number of its images with most tokens sent to
    the experts of that dataset group.

    Args:
        backend: ``faster_coco_eval``, the default, or ``pycocotools``.
        classwise: Whether to score each class.
        dataset_known: Whether detections of a dataset's image are selected among its
            classes; if not, they compete with those of other classes for their places.
        max_dets: Number of best detections of each class in an image that count; 100 in
            COCO. It warns once if images have more objects.
        collect_device: As for every mmengine metric.
    """

    default_prefix = "mixture"

    def __init__(
        self,
        *,
        backend: str | None = None,
        classwise: bool = False,
        dataset_known: bool = True,
        max_dets: int = MAX_DETS,
        collect_device: str = "cpu",
    ) -> None:
        super().__init__(collect_device=collect_device)
        self.backend, self.classwise = backend, classwise
        self.dataset_known = dataset_known
        check_sizes("MixtureMetric", max_dets=max_dets)
        self.max_dets, self._has_warned = max_dets, False

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Store a batch of predictions with their ground truth.

        Raises:
            ConfigError: If a sample does not come from a MixtureDataset.
            DataError: If scores of the detector are not finite.
        """
        for sample in data_samples:
            if "dataset_id" not in sample:
                raise ConfigError(
                    "MixtureMetric met a sample without dataset_id; use it with a "
                    "dataset of type='MixtureDataset' in val_dataloader and "
                    "test_dataloader."
                )
            found = sample["pred_instances"]
            if not torch.isfinite(found["scores"]).all():
                raise DataError(
                    f"the detector gives scores that are not numbers on an image of "
                    f"dataset {sample['dataset_name']!r}; did the training diverge? "
                    "Look at the loss in the log, and try a lower learning rate."
                )
            counts = sample.get("routing_counts") or {}
            of_all = of_dataset = _image_result(sample, found)
            if chosen := sample.get("dataset_instances"):
                of_dataset = _image_result(sample, chosen)
            self.results.append(
                _Row(
                    sample["dataset_id"],
                    sample.get("img_id", len(self.results)),
                    of_dataset,
                    of_all,
                    tokens_LE=np.array([*counts.values()]) if counts else None,
                    group_experts=sample.get("group_experts"),
                    window=sample.get("window"),
                    number=sample.get("image_number", 0),
                )
            )

    def compute_metrics(self, results: list[_Row]) -> dict[str, float]:
        """Compute the scores of every dataset with samples, their means, and pooled."""
        space = LabelSpace.from_metainfo(self.dataset_meta)
        # A DETR makes max_per_img detections of an image, or of each of its windows.
        made = max((len(row.of_all.scores) for row in results), default=0)
        windows = Counter(row.place for row in results if row.window is not None)
        results = _whole_images(sorted(results, key=lambda row: row.place))
        images = [row.of_all for row in results]
        if not self._has_warned:
            _warn_of_limits(results, self.max_dets, made, windows)
        self._has_warned = True
        scores: dict[str, float] = {}
        is_same = any(row.of_dataset is row.of_all for row in results)
        if is_same and self.dataset_known and len(space.dataset_names) > 1:
            print_log(
                "the detector chooses its detections among all classes; in the AP of a "
                "dataset, classes of other datasets may have taken their places.",
                logger="current",
                level=logging.WARNING,
            )
        for dataset_id, name in enumerate(space.dataset_names):
            rows = [row for row in results if row.dataset_id == dataset_id]
            if rows:
                known = self.dataset_known
                mine = [row.of_dataset if known else row.of_all for row in rows]
                found = self._scores(mine, space, space.valid_labels(dataset_id))
                found |= _routing_accuracy(rows, space.group_id(dataset_id))
                found |= _confusion(rows) if self.classwise else {}
                scores |= {f"{name}/{key}": value for key, value in found.items()}
        for key in ("AP", "AP50", "AP75", "routing_accuracy"):
            column = [v for name, v in scores.items() if name.endswith(f"/{key}")]
            if column:
                seen = [value for value in column if not math.isnan(value)]
                scores[f"mean/{key}"] = float(np.mean(seen)) if seen else math.nan
        if math.isnan(scores.get("mean/AP", math.nan)):
            print_log(
                "no image of the evaluation has an object that counts: AP is unknown, "
                "and no checkpoint is the best one.",
                logger="current",
                level=logging.WARNING,
            )
        pooled = self._scores(images, space, range(space.num_classes))
        scores |= {f"pooled/{key}": value for key, value in pooled.items()}
        tokens_SLE = [row.tokens_LE for row in results if row.tokens_LE is not None]
        if tokens_SLE:  # the busiest expert of each layer
            tokens_LE = np.sum(tokens_SLE, axis=0)
            load_L = tokens_LE.max(1) / np.maximum(tokens_LE.sum(1), 1)
            scores["mean/max_load"] = float(load_L.mean())
        print_log(str(scores), logger="current", level=logging.INFO)
        return scores

    def _scores(
        self, images: Sequence[ImageResult], space: LabelSpace, labels: Iterable[int]
    ) -> dict[str, float]:
        """Scores over some classes, with the numbers of images and boxes."""
        classes = {label: space.classes[label] for label in labels}
        found = coco_scores(
            images,
            classes=classes,
            backend=self.backend,
            classwise=self.classwise,
            max_dets=self.max_dets,
        )
        boxes = sum(len(image.ground_truth) for image in images)
        return {**found, "images": len(images), "boxes": boxes}


def _warn_of_limits(
    rows: Sequence[_Row], max_dets: int, made: int, windows: Mapping[Any, int]
) -> None:
    """Warn if images have more objects than detections count, or exist.

    ``made`` are the detections of an image or window, ``windows`` the numbers of
    windows of images that are not seen whole, by place.
    """
    labels = [
        [one["label"] for one in row.of_all.ground_truth if not one["iscrowd"]]
        for row in rows
    ]
    of_class = [max(Counter(one).values(), default=0) for one in labels]
    pairs = zip(labels, rows, strict=True)
    of_view = [math.ceil(len(one) / windows.get(row.place, 1)) for one, row in pairs]
    objects = "objects per window" if windows else "objects"
    metric = "set max_dets of MixtureMetric, which is 100 in COCO"
    detector = "raise max_per_img in model.test_cfg, and model.num_queries"
    for limit, counts, what, verb, advice in (
        (max_dets, of_class, "objects of one class", "count", metric),
        (made, of_view, objects, "are made", detector),
    ):
        above = sum(count > limit for count in counts)
        if above and limit:
            text = (
                f"{above} of {len(counts)} images have more than {limit} {what} (up to "
                f"{max(counts)}), and at most {limit} detections {verb}: AP cannot "
                f"reach 1. To change that, {advice}."
            )
            print_log(text, logger="current", level=logging.WARNING)


def score_names(datasets: Sequence[str], *, has_experts: bool) -> list[str]:
    """Return the names of MixtureMetric's scores for datasets, with its prefix.

    Those of single classes, with `classwise`, are left out.
    """
    means = ["AP", "AP50", "AP75", *["routing_accuracy", "max_load"] * has_experts]
    each = [*SCORE_NAMES, "images", "boxes"]
    rows = {"mean": means, "pooled": each}
    for name in datasets:
        rows[name] = [*each, *["routing_accuracy"] * has_experts]
    return [
        f"{MixtureMetric.default_prefix}/{name}/{score}"
        for name, scores in rows.items()
        for score in scores
    ]


def _image_result(sample: Mapping[str, Any], found: Mapping[str, Any]) -> ImageResult:
    left, top, *_ = sample.get("window", (0, 0))
    return ImageResult(
        boxes=found["bboxes"].float().cpu().numpy()
        + np.array([left, top] * 2, np.float32),
        scores=found["scores"].float().cpu().numpy(),
        labels=found["labels"].cpu().numpy(),
        ground_truth=sample["ground_truth"],
    )


def _whole_images(rows: Sequence[_Row]) -> list[_Row]:
    """Merge the rows of windows, sorted by image; others stay as they are."""
    found: list[_Row] = []
    for _, group in groupby(rows, key=lambda row: (row.place, row.window is None)):
        parts = [*group]
        if parts[0].window is None or len(parts) == 1:
            found += parts
            continue
        of_all = _merged([row.of_all for row in parts])
        is_same = parts[0].of_dataset is parts[0].of_all
        of_dataset = of_all if is_same else _merged([row.of_dataset for row in parts])
        tokens = [row.tokens_LE for row in parts if row.tokens_LE is not None]
        tokens_LE = np.sum(tokens, axis=0) if tokens else None
        found.append(
            replace(parts[0], of_all=of_all, of_dataset=of_dataset, tokens_LE=tokens_LE)
        )
    return found


def _merged(parts: Sequence[ImageResult]) -> ImageResult:
    """Detections in several windows of an image, those of one object once."""
    keys = ("boxes", "scores", "labels")
    every = {key: np.concatenate([getattr(one, key) for one in parts]) for key in keys}
    tensors = map(torch.from_numpy, every.values())
    kept = batched_nms(*tensors, iou_threshold=MERGE_IOU).numpy()
    return replace(parts[0], **{key: values[kept] for key, values in every.items()})


def _routing_accuracy(rows: Sequence[_Row], group: int) -> dict[str, float]:
    """Fraction of tokens routed to experts of the dataset's group, if known."""
    known = [
        (row.tokens_LE, list(row.group_experts[group]))
        for row in rows
        if row.tokens_LE is not None and row.group_experts is not None
    ]
    own = sum(tokens_LE[:, experts].sum() for tokens_LE, experts in known)
    total = sum(tokens_LE.sum() for tokens_LE, _ in known)
    return {"routing_accuracy": float(own / max(total, 1))} if known else {}


def _confusion(rows: Sequence[_Row]) -> dict[str, int]:
    """Number of images by the group whose experts most of their tokens went to."""
    counts = Counter[str]()
    for row in rows:
        if row.tokens_LE is not None and row.group_experts is not None:
            tokens_E = row.tokens_LE.sum(axis=0)
            tokens_G = [tokens_E[list(experts)].sum() for experts in row.group_experts]
            counts[f"confusion_{int(np.argmax(tokens_G))}"] += 1
    return counts
