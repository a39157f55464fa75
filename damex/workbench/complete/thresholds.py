"""Scores from which detections of a class are labels, from validation images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from mmdet.structures.bbox import bbox_overlaps

from damex.progress import Bar
from damex.workbench.complete.datasets import LabeledDataset, Objects
from damex.workbench.complete.teacher import Found, Teacher

MIN_OBJECTS = 5  # of a class, to choose its threshold on validation images
MIN_PRECISION = 0.5  # of labels
BETA_IGNORED = 2.0  # weight of recall over precision where detections are ignored
MIN_IOU = 0.5  # of a detection with its object


@dataclass(frozen=True)
class Threshold:
    """Scores from which a detection of a class is used, and what to expect of labels.

    Attributes:
        accepted: Detections become labels from here; infinite for none.
        ignored: Detections are ignored by the loss from here.
        precision: Share of the labels that are right, on validation images.
        recall: Share of the objects that get a label, on validation images.
        objects: Number of objects there.
    """

    accepted: float
    ignored: float
    precision: float | None
    recall: float | None
    objects: int

    @property
    def labels(self) -> bool:
        """Whether any detection becomes a label; else the class is not completed."""
        return self.accepted < math.inf

    @property
    def plain(self) -> dict[str, Any]:
        """Values for JSON, which has no infinity."""
        return {k: None if v == math.inf else v for k, v in vars(self).items()}


class Curve(NamedTuple):
    """Precision and recall of the detections with a score or more, best score first."""

    score_N: np.ndarray
    precision_N: np.ndarray
    recall_N: np.ndarray

    @classmethod
    def of(cls, score_N: np.ndarray, is_right_N: np.ndarray, objects: int) -> Curve:
        """Count detections of equal score together: a threshold takes all or none."""
        order_N = np.argsort(-score_N, kind="stable")
        score_N, right_N = score_N[order_N], np.cumsum(is_right_N[order_N])
        last = np.flatnonzero(np.append(np.diff(score_N) != 0, True)[: len(score_N)])
        recall = right_N[last] / max(objects, 1)
        return cls(score_N[last], right_N[last] / (last + 1), recall)

    def best(self, beta: float, *, least: float = 0.0) -> float:
        """Score with the best F-beta and a precision of ``least``; else infinite.

        F-beta weighs recall ``beta`` times as much as precision (van Rijsbergen 1979).
        """
        p_N, r_N, weight = self.precision_N, self.recall_N, beta**2
        f_N = (1 + weight) * p_N * r_N / np.maximum(weight * p_N + r_N, 1e-12)
        f_N = np.where(p_N >= least, f_N, 0.0)
        return float(self.score_N[f_N.argmax()]) if f_N.any() else math.inf


class Judged(NamedTuple):
    """Detections of a class: scores, whether they are right; number of objects."""

    score_N: np.ndarray
    is_right_N: np.ndarray
    objects: int


def find_thresholds(
    teacher: Teacher,
    references: Sequence[LabeledDataset],
    wanted: Sequence[str],
    min_score: float | None,
    bar: Bar,
) -> dict[str, Threshold]:
    """Choose the scores of each class on the validation images that label it.

    A class with fewer than ``MIN_OBJECTS`` objects there is left out, unless
    ``min_score`` is given. A dataset without any object of a class says nothing: its
    labels of that class may be predicted.
    """
    judged: dict[str, list[Judged]] = {name: [] for name in wanted}
    for one in references:
        split = one.splits["val"]
        shown = {name for objects in split.objects for name in objects.names}
        known = [name for name in wanted if name in shown]
        found = teacher.find(split.paths, known, bar, own=one.name) if known else []
        for detections, objects in zip(found, split.objects, strict=bool(known)):
            for name in known:
                judged[name].append(judge(detections, objects, name))
    thresholds = {}
    for name, rows in judged.items():
        empty = Judged(np.zeros(0), np.zeros(0, bool), 0)
        score_N, is_right_N, counts = zip(empty, *rows, strict=True)
        count = sum(counts)
        curve = Curve.of(np.concatenate(score_N), np.concatenate(is_right_N), count)
        if min_score is not None:
            thresholds[name] = _expected(curve, min_score, min_score / 2, count)
        elif count >= MIN_OBJECTS:
            accepted = curve.best(1.0, least=MIN_PRECISION)
            ignored = min(accepted, curve.best(BETA_IGNORED))
            thresholds[name] = _expected(curve, accepted, ignored, count)
    return thresholds


def _expected(curve: Curve, accepted: float, ignored: float, objects: int) -> Threshold:
    """Thresholds with the precision and recall of labels."""
    taken = np.flatnonzero(curve.score_N >= accepted)
    precision = float(curve.precision_N[taken[-1]]) if len(taken) else None
    recall = None
    if objects:
        recall = float(curve.recall_N[taken[-1]]) if len(taken) else 0.0
    return Threshold(accepted, ignored, precision, recall, objects)


def judge(found: Found, truth: Objects, name: str) -> Judged:
    """Judge the detections of a class in an image.

    As in COCO, each object counts once, for the best detection with an IoU of
    ``MIN_IOU``, and what else lies in a crowd does not count.
    """
    mine = [place for place, one in enumerate(found.names) if one == name]
    mine.sort(key=lambda place: -found.scores_N[place])
    boxes_N4 = torch.as_tensor(found.boxes_N4[mine]).double()
    objects_K4, crowds_C4 = (
        torch.as_tensor(truth.of(name, crowds=crowds)).double()
        for crowds in (False, True)
    )
    is_right_N = right_ones(boxes_N4, objects_K4)
    covered_NC = bbox_overlaps(boxes_N4, crowds_C4, mode="iof")
    counts_N = is_right_N | ~(covered_NC >= MIN_IOU).any(1).numpy()
    score_N = found.scores_N[mine]
    return Judged(score_N[counts_N], is_right_N[counts_N], len(objects_K4))


def right_ones(boxes_N4: torch.Tensor, objects_K4: torch.Tensor) -> np.ndarray:
    """Whether each box, best first, is the first of an object (N,)."""
    is_right_N = np.zeros(len(boxes_N4), bool)
    if not len(objects_K4):
        return is_right_N
    overlap_NK = bbox_overlaps(boxes_N4, objects_K4)
    for place, overlap_K in enumerate(overlap_NK):
        if is_right := bool(overlap_K.max() >= MIN_IOU):
            overlap_NK[:, overlap_K.argmax()] = 0.0
        is_right_N[place] = is_right
    return is_right_N
