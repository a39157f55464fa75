"""Who finds the objects that a dataset does not label: a detector, or a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torchvision.ops import nms

from damex.datasets.coco_records import parse_records, read_json
from damex.datasets.coco_schema import is_number
from damex.datasets.findings import Location, raise_first
from damex.datasets.image_files import images_of_any_size
from damex.errors import DataError
from damex.inference.predictor import Predictor, Tile
from damex.progress import Bar

SAME_OBJECT = 0.7  # IoU of two boxes of one object
LEAST = 0.02  # minimum score that is looked at


class Found(NamedTuple):
    """Detections in one image: corners in pixels, scores in [0, 1], class names."""

    boxes_N4: np.ndarray
    scores_N: np.ndarray
    names: tuple[str, ...]

    def only(self, wanted: Collection[str]) -> Found:
        """Keep the ``wanted`` classes."""
        kept = [place for place, name in enumerate(self.names) if name in wanted]
        return self._at(kept)

    def inside(self, size_2: np.ndarray) -> Found:
        """Clip to an image of a width and height, NaN if unknown; drop empty boxes."""
        limits_4 = np.tile(np.where(np.isnan(size_2), np.inf, size_2), 2)
        boxes_N4 = np.clip(self.boxes_N4.reshape(-1, 4), 0.0, limits_4)
        clipped = self._replace(boxes_N4=boxes_N4)
        is_real_N = (boxes_N4[:, 2:] > boxes_N4[:, :2]).all(axis=1)
        return clipped._at(np.flatnonzero(is_real_N).tolist())

    def _at(self, places: Sequence[int]) -> Found:
        names = tuple(self.names[place] for place in places)
        boxes_N4 = self.boxes_N4.reshape(-1, 4)[[*places]]
        return Found(boxes_N4, self.scores_N[[*places]], names)

    def without_doubles(self) -> Found:
        """Keep the best of detections of one object, whatever their classes."""
        boxes_N4 = torch.as_tensor(self.boxes_N4, dtype=torch.float32)
        scores_N = torch.as_tensor(self.scores_N, dtype=torch.float32)
        kept = nms(boxes_N4.reshape(-1, 4), scores_N, SAME_OBJECT).tolist()
        return self._at(kept)


class DetectorTeacher:
    """A detector of a mixture, asked as each of the datasets that label a class.

    So a class competes only with those of its own dataset, and a mixture of experts
    answers with the experts that learned the class where it is labeled.

    Attributes:
        classes: Names of the classes in the mixture.
        known: Class names of the datasets of the training, as in a label space.
        mixture: Entries of these datasets.
    """

    def __init__(self, predictor: Predictor, *, batch_size: int) -> None:
        self._predictor, self._batch_size = predictor, batch_size
        self.classes = tuple(predictor.classes)
        space = predictor.label_space
        self.known = dict(zip(space.dataset_names, space.dataset_classes, strict=True))
        self.mixture = predictor.mixture

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
        rows: list[list[int]] = [[] for _ in records.images]
        for place, record in enumerate(records.annotations):
            score: Any = record.get("score")
            if not is_number(score) or not 0 <= score <= 1:
                self._refuse(record, f"score is {score!r}, not a number in [0, 1]")
            if records.image_N[place] < 0 or records.class_N[place] < 0:
                self._refuse(record, "its image or category is not listed")
            if not records.is_box_N[place]:
                self._refuse(record, "bbox is not a list of four numbers")
            rows[records.image_N[place]].append(place)
        self._found: dict[str, Found] = {}
        self._users: dict[str, Path] = {}
        for image, record in enumerate(records.images):
            chosen = rows[image]
            boxes_N4 = records.box_N4[chosen].copy()
            boxes_N4[:, 2:] += boxes_N4[:, :2]
            scores = [records.annotations[place]["score"] for place in chosen]
            names = tuple(every[records.class_N[place]] for place in chosen)
            name = str(record.get("file_name")).replace("\\", "/").removeprefix("./")
            found = Found(boxes_N4, np.array(scores, float), names)
            if name in self._found:
                raise DataError(
                    f"{path}: two images have the file_name {name!r}; name the folders "
                    "that tell them apart."
                )
            self._found[name] = found.inside(records.size_M2[image])

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
