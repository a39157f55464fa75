"""Who finds the objects that a dataset does not label: a detector, or a file.

And the scores from which detections of a class are labels, from validation images.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from mmdet.structures.bbox import bbox_overlaps
from torchvision.ops import nms

from damex.datasets.coco_records import parse_records, read_json
from damex.datasets.coco_schema import is_number
from damex.datasets.findings import Location, raise_first
from damex.datasets.image_files import images_of_any_size
from damex.errors import DataError
from damex.inference.predictor import Predictor, Tile
from damex.progress import Bar
from damex.workbench.complete.datasets import LabeledDataset, Objects, clipped_boxes

SAME_OBJECT = 0.7  # IoU of two boxes of one object
LEAST = 0.02  # minimum score that is looked at
MIN_OBJECTS = 5  # of a class, to choose its threshold on validation images
MIN_PRECISION = 0.5  # of labels
BETA_IGNORED = 2.0  # weight of recall over precision where detections are ignored
MIN_IOU = 0.5  # of a detection with its object

# Detections of a class: scores, whether they are right; number of objects.
Judged = tuple[np.ndarray, np.ndarray, int]


class Found(NamedTuple):
    """Detections in one image: corners in pixels, scores in [0, 1], class names."""

    boxes_N4: np.ndarray
    scores_N: np.ndarray
    names: tuple[str, ...]

    def only(self, wanted: Collection[str]) -> Found:
        """Keep the ``wanted`` classes."""
        kept = [place for place, name in enumerate(self.names) if name in wanted]
        return self._at(kept)

    def _at(self, places: Sequence[int]) -> Found:
        names = tuple(self.names[place] for place in places)
        boxes_N4 = self.boxes_N4.reshape(-1, 4)[[*places]]
        return Found(boxes_N4, self.scores_N[[*places]], names)

    def without_doubles(self) -> Found:
        """Keep the best detection of each object, regardless of class."""
        boxes_N4 = torch.as_tensor(self.boxes_N4, dtype=torch.float32)
        scores_N = torch.as_tensor(self.scores_N, dtype=torch.float32)
        kept = nms(boxes_N4.reshape(-1, 4), scores_N, SAME_OBJECT).tolist()
        return self._at(kept)


class DetectorTeacher:
    """A detector of a mixture, asked as each of the datasets that label a class.

    So a class competes only with those of its own dataset, and a mixture of experts
    uses the experts that learned the class from its labels.
    """

    def __init__(self, predictor: Predictor, *, batch_size: int) -> None:
        self._predictor, self._batch_size = predictor, batch_size
        self.classes = tuple(predictor.classes)  # in the mixture
        space = predictor.label_space
        # Class names of the datasets of the training, and their entries.
        self.known = dict(zip(space.dataset_names, space.dataset_classes, strict=True))
        self.mixture = predictor.stored.mixture

    def find(
        self, images: Sequence[Path], wanted: Collection[str], bar: Bar, *, own: str
    ) -> list[Found]:
        """Return the detections of the ``wanted`` classes in each image.

        Those of a dataset of the training, their ``own``, are seen as it was there.
        """
        found: list[list[Found]] = [[] for _ in images]
        tile: Tile = self._predictor.tile_of([own]) if own in self.known else "auto"
        datasets = self._predictor.datasets
        asked = [name for name, own in datasets.items() if {*own} & {*wanted}]
        for dataset in asked:
            bar.begin(f"as {dataset}", len(images))
            stream = self._predictor.stream(
                images, dataset, LEAST, self._batch_size, tile=tile
            )
            with images_of_any_size():  # as in training
                for rows, one in zip(found, stream, strict=True):
                    rows.append(Found(one.boxes, one.scores, one.names).only(wanted))
                    bar.step()
        return [_joined(rows) for rows in found]


class FileTeacher:
    """Detections of somebody else's model: a COCO file whose annotations have scores.

    An image is found by the longest ``file_name`` that its path ends with. DataError if
    it is not such a file.
    """

    known: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    mixture: Sequence[Mapping[str, Any]] = ()

    def __init__(self, path: str) -> None:
        self._path, location = path, Location("", path)
        document, findings = read_json(path, location)
        raise_first(findings)
        records, findings = parse_records(document, location)
        raise_first(findings)
        assert records is not None
        every = [*records.categories.values()]
        self.classes = tuple(dict.fromkeys(every))
        corners_N4, is_real_N = clipped_boxes(records)
        rows: list[list[int]] = [[] for _ in records.images]
        for place, record in enumerate(records.annotations):
            score: Any = record.get("score")
            if not is_number(score) or not 0 <= score <= 1:
                self._refuse(record, f"score is {score!r}, not a number in [0, 1]")
            if records.image_N[place] < 0 or records.class_N[place] < 0:
                self._refuse(record, "its image or category is not listed")
            if not records.is_box_N[place]:
                self._refuse(record, "bbox is not a list of four numbers")
            if is_real_N[place]:
                rows[records.image_N[place]].append(place)
        self._found: dict[str, Found] = {}
        self._users: dict[str, Path] = {}
        for record, chosen in zip(records.images, rows, strict=True):
            scores = [records.annotations[place]["score"] for place in chosen]
            names = tuple(every[records.class_N[place]] for place in chosen)
            name = str(record.get("file_name")).replace("\\", "/").removeprefix("./")
            if name in self._found:
                raise DataError(
                    f"{path}: two images have the file_name {name!r}; name the folders "
                    "that tell them apart."
                )
            scores_N = np.array(scores, float)
            self._found[name] = Found(corners_N4[chosen], scores_N, names)

    def _refuse(self, record: Mapping[str, Any], problem: str) -> NoReturn:
        raise DataError(
            f"{self._path}: annotation {record.get('id')}: {problem}. --from needs "
            "detections: a COCO file whose annotations have a score, as damex predict "
            "--json writes it."
        )

    def find(
        self, images: Sequence[Path], wanted: Collection[str], bar: Bar, *, own: str
    ) -> list[Found]:
        """Return the detections of the ``wanted`` classes in each image."""
        return [self._of(path).only(wanted).without_doubles() for path in images]

    def _of(self, path: Path) -> Found:
        parts = path.absolute().parts
        ends = ("/".join(parts[start:]).lstrip("/") for start in range(len(parts)))
        name = next((one for one in (str(path), *ends) if one in self._found), None)
        if name is None:
            raise DataError(
                f"{self._path} has no image {path.name} ({path}). Detect in all "
                "training and validation images, and name them in file_name by the end "
                "of their paths."
            )
        if (other := self._users.setdefault(name, path)) != path:
            raise DataError(
                f"{self._path}: the image {name} may be {other} or {path}; name the "
                "folders in file_name that tell them apart."
            )
        return self._found[name]


Teacher = DetectorTeacher | FileTeacher


def _joined(rows: Sequence[Found]) -> Found:
    """The detections of several passes in one image, each object once."""
    if not rows:
        return Found(np.zeros((0, 4)), np.zeros(0), ())
    boxes_N4 = np.concatenate([one.boxes_N4 for one in rows])
    scores_N = np.concatenate([one.scores_N for one in rows])
    names = tuple(name for one in rows for name in one.names)
    return Found(boxes_N4, scores_N, names).without_doubles()


@dataclass(frozen=True)
class Threshold:
    """Scores from which detections of a class are used, and what to expect of these."""

    accepted: float  # detections become labels from here; infinite for none
    ignored: float  # detections are ignored by the loss from here
    precision: float | None  # share of the labels that are right, on validation images
    recall: float | None  # share of the objects there that get a label
    objects: int  # their number

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


def find_thresholds(
    teacher: Teacher,
    references: Sequence[LabeledDataset],
    wanted: Sequence[str],
    min_score: float | None,
    bar: Bar,
) -> dict[str, Threshold]:
    """Choose the scores of each class on the validation images that label it.

    A class with fewer than ``MIN_OBJECTS`` objects there is left out, unless
    ``min_score`` is given. A dataset without any object of a class is skipped: its
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
        empty = (np.zeros(0), np.zeros(0, bool), 0)
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
    is_name_N = np.array([one == name for one in truth.names], bool)
    objects_K4, crowds_C4 = (
        torch.as_tensor(truth.corners_N4[is_name_N & chosen_N]).double()
        for chosen_N in (~truth.is_crowd_N, truth.is_crowd_N)
    )
    is_right_N = right_ones(boxes_N4, objects_K4)
    covered_NC = bbox_overlaps(boxes_N4, crowds_C4, mode="iof")
    counts_N = is_right_N | ~(covered_NC >= MIN_IOU).any(1).numpy()
    return found.scores_N[mine][counts_N], is_right_N[counts_N], len(objects_K4)


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
