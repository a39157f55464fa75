"""Who finds the objects that a dataset does not label: a detector, or a file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torchvision.ops import nms

from damex.datasets.coco_records import parse_records, read_json
from damex.datasets.coco_schema import is_number
from damex.datasets.findings import Location, raise_first
from damex.errors import DataError
from damex.inference.predictor import Predictor
from damex.progress import Bar

SAME_OBJECT = 0.7  # IoU of two boxes of one object
LEAST = 0.02  # minimum score that is looked at


class Found(NamedTuple):
    """Detections in one image: corners in pixels, scores in [0, 1], class names."""

    boxes_N4: np.ndarray
    scores_N: np.ndarray
    names: tuple[str, ...]

    def without_doubles(self) -> Found:
        """Keep the best of detections of one object, whatever their classes."""
        boxes_N4 = torch.as_tensor(self.boxes_N4, dtype=torch.float32)
        scores_N = torch.as_tensor(self.scores_N, dtype=torch.float32)
        kept = nms(boxes_N4.reshape(-1, 4), scores_N, SAME_OBJECT).tolist()
        names = tuple(self.names[place] for place in kept)
        return Found(self.boxes_N4.reshape(-1, 4)[kept], self.scores_N[kept], names)


class Teacher(Protocol):
    """Finds objects in images."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the mixture."""
        ...

    @property
    def known(self) -> Mapping[str, Mapping[str, str]]:
        """Class names of the datasets that it was trained on, as in a label space."""
        ...

    @property
    def mixture(self) -> Sequence[Mapping[str, Any]]:
        """Entries of the datasets that it was trained on."""
        ...

    def find(
        self, images: Sequence[Path], wanted: Collection[str], bar: Bar
    ) -> list[Found]:
        """Return the detections of the ``wanted`` classes in each image."""
        ...


class DetectorTeacher:
    """A detector of a mixture, asked as each of the datasets that label a class.

    So a class competes only with those of its own dataset, and a mixture of experts
    answers with the experts that learned the class where it is labeled.
    """

    def __init__(self, predictor: Predictor, *, batch_size: int) -> None:
        self._predictor, self._batch_size = predictor, batch_size
        self.classes = tuple(predictor.classes)
        space = predictor.label_space
        self.known = dict(zip(space.dataset_names, space.dataset_classes, strict=True))
        self.mixture = predictor.mixture

    def find(
        self, images: Sequence[Path], wanted: Collection[str], bar: Bar
    ) -> list[Found]:
        """Return the detections of the ``wanted`` classes in each image."""
        found: list[list[Found]] = [[] for _ in images]
        datasets = self._predictor.datasets
        asked = [name for name, own in datasets.items() if {*own} & {*wanted}]
        for dataset in asked:
            bar.begin(f"as {dataset}", len(images))
            stream = self._predictor.stream(images, dataset, LEAST, self._batch_size)
            for rows, one in zip(found, stream, strict=True):
                keep_N = np.array([name in wanted for name in one.names], bool)
                names = tuple(name for name in one.names if name in wanted)
                rows.append(Found(one.boxes[keep_N], one.scores[keep_N], names))
                bar.step()
        return [_joined(rows) for rows in found]


class FileTeacher:
    """Detections of somebody else's model: a COCO file whose annotations have scores.

    Images are found by ``file_name``, else by its last part if that is unique.

    Raises:
        DataError: If it is not such a file.
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
        self._by_name: dict[str, Found] = {}
        rows: dict[int, list[int]] = {}
        for position, record in enumerate(records.annotations):
            if not is_number(record.get("score")):
                raise DataError(
                    f"{path}: annotation {record.get('id')} has no score. --from needs "
                    "detections: a COCO file whose annotations have a score in [0, 1], "
                    "as damex predict --json writes it."
                )
            rows.setdefault(int(records.image_N[position]), []).append(position)
        every = [*records.categories.values()]
        self.classes = tuple(dict.fromkeys(every))
        for image, record in enumerate(records.images):
            chosen = [p for p in rows.get(image, ()) if records.is_box_N[p]]
            boxes_N4 = records.box_N4[chosen].copy()
            boxes_N4[:, 2:] += boxes_N4[:, :2]
            scores_N = np.array([records.annotations[p]["score"] for p in chosen])
            names = tuple(every[records.class_N[p]] for p in chosen)
            name = str(record.get("file_name")).replace("\\", "/")
            self._by_name[name] = Found(boxes_N4, scores_N.astype(float), names)
        self._by_last: dict[str, list[str]] = {}
        for name in self._by_name:
            self._by_last.setdefault(name.rpartition("/")[2], []).append(name)

    def find(
        self, images: Sequence[Path], wanted: Collection[str], bar: Bar
    ) -> list[Found]:
        """Return the detections of the ``wanted`` classes in each image."""
        return [self._of(path, wanted) for path in images]

    def _of(self, path: Path, wanted: Collection[str]) -> Found:
        name, given = path.as_posix(), self._by_last.get(path.name, [])
        fitting = [one for one in given if name == one or name.endswith(f"/{one}")]
        chosen = fitting or given
        if len(chosen) != 1:
            what = "has several images" if chosen else "has no image"
            raise DataError(
                f"{self._path} {what} of the name {path.name}, which a dataset needs "
                f"({path}). Detect in all training and validation images, and give "
                "file_name with the folders that tell them apart."
            )
        one = self._by_name[chosen[0]]
        keep = [place for place, name in enumerate(one.names) if name in wanted]
        names = tuple(one.names[place] for place in keep)
        return Found(one.boxes_N4[keep], one.scores_N[keep], names).without_doubles()


def _joined(rows: Iterable[Found]) -> Found:
    """The detections of several passes in one image, each object once."""
    every = [*rows]
    if not every:
        return Found(np.zeros((0, 4)), np.zeros(0), ())
    boxes_N4 = np.concatenate([one.boxes_N4 for one in every])
    scores_N = np.concatenate([one.scores_N for one in every])
    names = tuple(name for one in every for name in one.names)
    return Found(boxes_N4, scores_N, names).without_doubles()
