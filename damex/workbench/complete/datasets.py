"""Datasets with the classes that they label, read and written as COCO files."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from damex.datasets.coco_records import Records, parse_records, read_coco
from damex.datasets.spec import SPLITS, DatasetSpec, parse_mixture
from damex.errors import ConfigError, DataError
from damex.files import write_json


class Objects(NamedTuple):
    """Labeled boxes of an image: corners in pixels, names in the mixture, crowds."""

    corners_N4: np.ndarray
    names: tuple[str, ...]
    is_crowd_N: np.ndarray


@dataclass(frozen=True)
class Split:
    """Images of a split, and their labels."""

    document: Mapping[str, Any]  # the COCO file
    images: Sequence[Mapping[str, Any]]  # its readable image records
    paths: Sequence[Path]
    # Those of labeled classes, with the name in the mixture.
    annotations: Sequence[tuple[Mapping[str, Any], str]]
    objects: Sequence[Objects]  # of each image


@dataclass(frozen=True)
class LabeledDataset:
    """A dataset whose classes have their names in the mixture."""

    name: str
    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    predicted: Collection[str] = ()  # those that were completed before


def read_datasets(
    entries: Sequence[Mapping[str, Any]],
    known: Mapping[str, Mapping[str, str]],
    wanted: Collection[str],
) -> list[LabeledDataset]:
    """Read the datasets of mixture entries.

    ``known`` are class names of the datasets of a training, as in a label space. What
    the training left out is left out, except the ``wanted`` classes, to be completed.
    ConfigError if a dataset is not in COCO format or a folder, has no validation
    images, or is not the one that was trained under its name; DataError if it cannot be
    read.
    """
    found = []
    for spec in parse_mixture(entries):
        names = _names_of(spec)
        trained = known.get(spec.name)
        if trained is None:
            kept = names if spec.classes is None else spec.classes
            classes = {name: spec.rename.get(name, name) for name in kept}
        elif lacks := [name for name in trained if name not in names]:
            raise ConfigError(
                f"dataset {spec.name!r} was trained with the class {lacks[0]!r}, which "
                f"its training labels here lack ({', '.join(names)}). If it is another "
                f"dataset, give it another name: --data OTHER=FOLDER."
            )
        else:
            # A class that was left out, unless another has its name in the mixture.
            others = {*wanted} - {*trained.values()}
            classes = {**{name: name for name in names if name in others}, **trained}
        own = [s for s in SPLITS if s != "test" or spec.source(s) != spec.source("val")]
        splits = {name: _read(spec, name, classes) for name in own}
        if splits["val"] is None:
            raise ConfigError(
                f"dataset {spec.name!r} has no validation images, and completed images "
                "cannot be any; name some with val=... in its entry."
            )
        read = {name: split for name, split in splits.items() if split is not None}
        every = tuple(dict.fromkeys(classes.values()))
        rows = read["train"].document["categories"]
        before = [row["name"] for row in rows if row.get("predicted")]
        predicted = {classes[name] for name in before if name in classes}
        found.append(LabeledDataset(spec.name, every, read, predicted))
    return found


def _names_of(spec: DatasetSpec) -> list[str]:
    """Class names of the training file."""
    source = spec.coco_source("train")
    if source is None:
        raise ConfigError(
            f"dataset {spec.name!r} is read by an mmdet dataset class, and labels are "
            "added to COCO files; convert it: damex data convert."
        )
    document = read_coco(source.annotations, spec.name)
    records, _ = parse_records(document, source.location, spec.classes)
    assert records is not None  # read_coco has checked it
    return [*records.categories.values()]


def _read(spec: DatasetSpec, split: str, classes: Mapping[str, str]) -> Split | None:
    """Read a split; None if the dataset has no such file."""
    source = spec.coco_source(split)
    if source is None:
        return None
    document = read_coco(source.annotations, spec.name)
    records, _ = parse_records(document, source.location, tuple(classes))
    assert records is not None  # read_coco has checked it
    own = [classes.get(name, "") for name in records.categories.values()]
    names = [own[place] if place >= 0 else "" for place in records.class_N]
    is_crowd_N = records.is_set("iscrowd")
    corners_N4, is_real_N = clipped_boxes(records)
    rows: list[list[int]] = [[] for _ in records.images]
    annotations = []
    for place, (row, name) in enumerate(zip(records.annotations, names, strict=True)):
        if name and records.image_N[place] >= 0:
            annotations.append((row, name))
            if is_real_N[place]:
                rows[records.image_N[place]].append(place)
    return Split(
        document,
        records.images,
        [source.images / str(image.get("file_name")) for image in records.images],
        annotations,
        [
            Objects(corners_N4[row], tuple(names[p] for p in row), is_crowd_N[row])
            for row in rows
        ],
    )


def clipped_boxes(records: Records) -> tuple[np.ndarray, np.ndarray]:
    """Corners (N, 4) of boxes within their images, and which boxes have an area."""
    corners_N4 = records.box_N4.copy()
    corners_N4[:, 2:] += corners_N4[:, :2]
    limits_N4 = np.tile(np.nan_to_num(records.size_N2, nan=np.inf), 2)
    corners_N4 = np.clip(corners_N4, 0.0, limits_N4)  # as in training
    is_real_N = records.is_box_N & (corners_N4[:, 2:] > corners_N4[:, :2]).all(1)
    return corners_N4, is_real_N


@dataclass(frozen=True)
class Label:
    """A detection that is used."""

    image: int  # its position in the split
    box: tuple[float, float, float, float]  # corners in pixels
    name: str
    score: float
    is_accepted: bool  # whether it becomes a label; else the loss ignores it
    id: int = 0


def write_dataset(
    folder: Path,
    dataset: LabeledDataset,
    labels: Sequence[Label],
    missing: Sequence[str],
    about: Mapping[str, Any],
) -> list[Label]:
    """Write COCO files, and links to images; return the labels with their ids.

    The files have the classes of the dataset by their names in the mixture, and behind
    them the ``missing`` ones. New annotations have ``score`` and ``predicted``; those
    that are not accepted are crowds, which evaluation and loss ignore.
    """
    numbers = {n: i for i, n in enumerate((*dataset.classes, *missing), start=1)}
    predicted = {*missing, *dataset.predicted}
    categories = [
        dict(id=i, name=name, **({"predicted": True} if name in predicted else {}))
        for name, i in numbers.items()
    ]
    own = (row["id"] for row, _ in dataset.splits["train"].annotations)
    last = max((int(i) for i in own if isinstance(i, (int, float))), default=0)
    numbered = [replace(one, id=last + n) for n, one in enumerate(labels, start=1)]
    for name, split in dataset.splits.items():
        added = [
            _annotation(one, split.images[one.image]["id"], numbers[one.name])
            for one in (numbered if name == "train" else ())
        ]
        pairs = enumerate(zip(split.images, split.paths, strict=True))
        images = [
            {**image, "file_name": _linked(folder, name, number, image, path)}
            for number, (image, path) in pairs
        ]
        kept = [{**row, "category_id": numbers[own]} for row, own in split.annotations]
        info = split.document.get("info")
        info = {**(info if isinstance(info, dict) else {}), "completed": dict(about)}
        content = dict(images=images, annotations=kept + added, categories=categories)
        write_json(folder / f"{name}.json", {**split.document, "info": info, **content})
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
        iscrowd=int(not one.is_accepted),
        score=round(one.score, 4),
        predicted=True,
    )


def _linked(
    folder: Path, split: str, number: int, image: Mapping[str, Any], path: Path
) -> str:
    """Link an image into a folder, or copy it where links are not allowed."""
    name = PurePosixPath(str(image.get("file_name")).replace("\\", "/"))
    is_hidden = any(part.startswith(".") for part in name.parts)  # or ".."
    if name.is_absolute() or is_hidden:
        name = PurePosixPath(f"{number}_{name.name}")
    name = PurePosixPath("images", split) / name
    target = folder / name
    if not path.is_file():
        raise DataError(f"the image {path} does not exist; run damex data check.")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.symlink_to(path.resolve())
        except OSError:  # Windows without the right to make links
            shutil.copyfile(path, target)
    return str(name)
