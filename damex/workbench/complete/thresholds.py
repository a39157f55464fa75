"""Scores from which the finds of a class are labels, from validation images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from damex.evaluation import MAX_DETS, ImageResult, coco_evaluation
from damex.progress import Bar
from damex.workbench.complete.datasets import LabeledDataset
from damex.workbench.complete.teacher import Teacher

MIN_OBJECTS = 5  # of a class, to choose its threshold on validation images
MIN_PRECISION = 0.5  # of labels: more than half of them have to be right
DOUBT = 2.0  # weight of recall over precision where a find is ignored at least


@dataclass(frozen=True)
class Threshold:
    """Scores from which a find of a class is used, and what to expect of its labels.

    Attributes:
        sure: Finds become labels from here; above 1 for none.
        doubtful: Finds are ignored by the loss from here.
        precision: Share of the labels that are right, on validation images.
        recall: Share of the objects that get a label, on validation images.
        objects: Number of objects there.
    """

    sure: float
    doubtful: float
    precision: float | None
    recall: float | None
    objects: int

    @property
    def plain(self) -> dict[str, Any]:
        """Values for JSON, which has no infinity."""
        return {k: None if v == math.inf else v for k, v in vars(self).items()}


@dataclass(frozen=True)
class Curve:
    """Precision over recall of one class at IoU 0.5, as in COCO.

    Args:
        precision_R: In [0, 1], at 101 recalls; 0 where a recall is not reached.
        recall_R: 0, 0.01, ..., 1.
        score_R: Scores of the detections with which recalls are reached.
        objects: Number of objects.
    """

    precision_R: np.ndarray
    recall_R: np.ndarray
    score_R: np.ndarray
    objects: int


def precision_curve(images: Sequence[ImageResult], label: int) -> Curve:
    """Precision, recall and score of the detections of one class."""
    recall_R = np.linspace(0, 1, 101)
    found = coco_evaluation(images, {label: "class"}, None, MAX_DETS)
    if found is None:
        return Curve(np.zeros(101), recall_R, np.zeros(101), 0)
    objects = sum(
        one["label"] == label and not one["iscrowd"]
        for image in images
        for one in image.ground_truth
    )
    precision_R, score_R = (found[key][0, :, 0, 0] for key in ("precision", "scores"))
    return Curve(precision_R.clip(min=0), recall_R, score_R.clip(min=0), objects)


def find_thresholds(
    teacher: Teacher,
    witnesses: Sequence[LabeledDataset],
    wanted: Sequence[str],
    min_score: float | None,
    bar: Bar,
) -> dict[str, Threshold]:
    """Choose the scores of each class on the validation images that label it.

    A class with fewer than ``MIN_OBJECTS`` objects there is left out, unless
    ``min_score`` is given.
    """
    images: dict[str, list[Any]] = {name: [] for name in wanted}
    for one in witnesses:
        known = [name for name in wanted if name in one.classes.values()]
        if known and (split := one.splits.get("val")) is not None:
            found = teacher.find(split.paths, known, bar)
            results = one.results(found, wanted)
            for name in known:
                images[name] += results
    thresholds = {}
    for label, name in enumerate(wanted):
        curve = precision_curve(images[name], label)
        if min_score is not None:
            thresholds[name] = _at(curve, min_score, min_score / DOUBT)
        elif curve.objects >= MIN_OBJECTS:
            sure = _best(curve, 1.0, least=MIN_PRECISION)
            doubtful = _best(curve, DOUBT)
            thresholds[name] = _at(curve, sure, min(sure, doubtful))
    return thresholds


def _best(curve: Curve, beta: float, *, least: float = 0.0) -> float:
    """Score with the best F-beta among those with a precision of ``least``; else inf.

    F-beta weighs recall ``beta`` times as much as precision (van Rijsbergen 1979).
    """
    best, weight = (0.0, math.inf), beta**2
    for score in np.unique(curve.score_R[curve.precision_R > 0]).tolist():
        p, r = _at_score(curve, score)
        if p >= least and r > 0:
            best = max(best, ((1 + weight) * p * r / (weight * p + r), score))
    return best[1]


def _at_score(curve: Curve, score: float) -> tuple[float, float]:
    """Precision and recall of the detections with a score or more."""
    reached = np.flatnonzero((curve.precision_R > 0) & (curve.score_R >= score))
    if not len(reached):
        return 0.0, 0.0
    return float(curve.precision_R[reached[-1]]), float(curve.recall_R[reached[-1]])


def _at(curve: Curve, sure: float, doubtful: float) -> Threshold:
    """The thresholds with the precision and recall of labels."""
    precision = recall = None
    if curve.objects:
        precision, recall = _at_score(curve, sure)
    return Threshold(sure, doubtful, precision or None, recall, curve.objects)
