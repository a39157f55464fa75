"""Datasets with the classes that they label, read and written as COCO files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from damex.datasets.coco_records import Records, parse_records, read_coco
from damex.datasets.spec import SPLITS, DatasetSpec, parse_mixture
from damex.errors import ConfigError
from damex.evaluation import ImageResult
from damex.files import write_json
from damex.workbench.complete.teacher import Found

IMAGES = PurePosixPath("images")  # for images that lie in no folder


@dataclass(frozen=True)
class Split:
    """A COCO document with its image folder."""

    document: dict[str, Any]
    records: Records
    folder: Path

    @classmethod
    def read(cls, spec: DatasetSpec, split: str) -> Split | None:
        """Read a split; None if the dataset has no such COCO file."""
        source = spec.coco_source(split)
        if source is None:
            return None
        document = read_coco(source.annotations, spec.name)
        records, _ = parse_records(document, source.location, spec.classes)
        assert records is not None  # read_coco has checked it
        return cls(document, records, source.images)

    @cached_property
    def paths(self) -> list[Path]:
        """The image files."""
        return [self.folder / str(i.get("file_name")) for i in self.records.images]

    def boxes_of(self, image: int) -> np.ndarray:
        """Corners (N, 4) in pixels of the labeled boxes of an image, by position."""
        records = self.records
        box_N4 = records.box_N4[(records.image_N == image) & records.is_box_N].copy()
        box_N4[:, 2:] += box_N4[:, :2]
        return box_N4


@dataclass(frozen=True)
class LabeledDataset:
    """A dataset of a mixture.

    Attributes:
        classes: Class name of the dataset -> name in the mixture, of those that people
            labeled.
    """

    name: str
    classes: Mapping[str, str]
    splits: Mapping[str, Split]

    def missing(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """Those of the ``wanted`` classes that it does not label."""
        known = {*self.classes.values()}
        return tuple(name for name in wanted if name not in known)

    def results(
        self, found: Sequence[Found], wanted: Sequence[str]
    ) -> list[ImageResult]:
        """Detections and labels of the validation images; labels index ``wanted``."""
        number = {name: place for place, name in enumerate(wanted)}
        records = self.splits["val"].records
        own = [self.classes.get(name, "") for name in records.categories.values()]
        label_N = np.array([*(number.get(name, -1) for name in own), -1])
        label_N = label_N[records.class_N]
        is_wanted_N = (label_N >= 0) & records.is_box_N & (records.image_N >= 0)
        crowd_N = records.is_set("iscrowd")
        truth: list[list[dict[str, Any]]] = [[] for _ in records.images]
        for place in np.flatnonzero(is_wanted_N).tolist():
            one = dict(
                bbox=records.box_N4[place].tolist(),
                area=float(records.area_N[place]),
                label=int(label_N[place]),
                iscrowd=int(crowd_N[place]),
            )
            truth[records.image_N[place]].append(one)
        return [
            ImageResult(
                width=0,
                height=0,
                boxes=one.boxes_N4,
                scores=one.scores_N,
                labels=np.array([number[name] for name in one.names], int),
                ground_truth=rows,
            )
            for one, rows in zip(found, truth, strict=True)
        ]


def read_datasets(
    entries: Sequence[Mapping[str, Any]], known: Mapping[str, Mapping[str, str]]
) -> list[LabeledDataset]:
    """Read the datasets of mixture entries.

    ``known`` are the class names of the datasets of a detector, as in a label space.

    Raises:
        ConfigError: If a dataset is not in COCO format or a folder.
        DataError: If it cannot be read.
    """
    found = []
    for spec in parse_mixture(entries):
        splits = {split: Split.read(spec, split) for split in SPLITS}
        if splits["test"] is not None and spec.source("test") == spec.source("val"):
            splits["test"] = None
        if splits["train"] is None:
            raise ConfigError(
                f"dataset {spec.name!r} is read by an mmdet dataset class, and labels "
                "are added to COCO files; convert it: damex data convert."
            )
        own = known.get(spec.name) or {
            name: spec.rename.get(name, name) for name in spec.own_classes
        }
        kept = {name: split for name, split in splits.items() if split is not None}
        found.append(LabeledDataset(spec.name, dict(own), kept))
    return found


@dataclass(frozen=True)
class Label:
    """A found object.

    Attributes:
        image: Position of the image in its split.
        box: Corners in pixels.
        is_sure: Whether it becomes a label; else the loss ignores it.
        id: Id of its annotation.
    """

    image: int
    box: tuple[float, float, float, float]
    name: str
    score: float
    is_sure: bool
    id: int = 0


def write_dataset(
    folder: Path,
    dataset: LabeledDataset,
    labels: Sequence[Label],
    missing: Sequence[str],
    about: Mapping[str, Any],
) -> list[Label]:
    """Write a completed dataset: COCO files, and links to its images.

    The files have the categories of the dataset, and behind them the ``missing`` ones.
    New annotations have ``score`` and ``predicted``; those that are not sure are
    crowds, which evaluation and loss ignore.

    Returns:
        The labels with their ids.
    """
    ids = _largest(dataset.splits["train"].document["annotations"])
    numbered = [replace(one, id=ids + n) for n, one in enumerate(labels, start=1)]
    for split, part in dataset.splits.items():
        kept = part.document
        categories = _with_classes(kept["categories"], missing)
        numbers = {category["name"]: category["id"] for category in categories}
        added = [
            _annotation(one, part.records.images[one.image]["id"], numbers[one.name])
            for one in (numbered if split == "train" else ())
        ]
        images = [
            {**image, "file_name": _linked(folder, image, path)}
            for image, path in zip(part.records.images, part.paths, strict=True)
        ]
        content = {
            **kept,
            "info": {**(kept.get("info") or {}), "completed": dict(about)},
            "images": images,
            "annotations": [*kept["annotations"], *added],
            "categories": categories,
        }
        write_json(folder / f"{split}.json", content)
    return numbered


def _annotation(one: Label, image: Any, category: int) -> dict[str, Any]:
    x1, y1, x2, y2 = one.box
    sides = [round(value, 2) for value in (x1, y1, x2 - x1, y2 - y1)]
    return dict(
        id=one.id,
        image_id=image,
        category_id=category,
        bbox=sides,
        area=round(sides[2] * sides[3], 2),
        iscrowd=int(not one.is_sure),
        score=round(one.score, 4),
        predicted=True,
    )


def _with_classes(
    own: Sequence[Mapping[str, Any]], names: Iterable[str]
) -> list[Mapping[str, Any]]:
    """Categories of a file with new ones behind them."""
    free = _largest(own) + 1
    new = [dict(id=free + n, name=name, predicted=True) for n, name in enumerate(names)]
    return [*own, *new]


def _largest(records: Sequence[Mapping[str, Any]]) -> int:
    """The largest whole number among the ids of records; 0 without any."""
    return max((row["id"] for row in records if type(row["id"]) is int), default=0)


def _linked(folder: Path, image: Mapping[str, Any], path: Path) -> str:
    """Link an image into a folder, or copy it where links are not allowed."""
    name = PurePosixPath(str(image["file_name"]).replace("\\", "/"))
    if name.is_absolute() or ".." in name.parts:
        name = PurePosixPath(f"{image['id']}_{name.name}")
    if len(name.parts) == 1:
        name = IMAGES / name
    target = folder / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.symlink_to(path.resolve())
        except OSError:  # Windows without the right to make links
            shutil.copyfile(path, target)
    return str(name)
