"""The images that are looked at: those of the command line, or of the mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from damex.datasets.coco_checks import read_coco
from damex.datasets.label_space import LabelSpace
from damex.datasets.spec import parse_mixture
from damex.errors import ConfigError, DataError
from damex.inference.images import find_images, names_of
from damex.inference.stored import StoredDetector


@dataclass(frozen=True)
class Row:
    """Images that are one row of the tables.

    Attributes:
        name: Of the dataset, or of the folder that the images lie in.
        group: Number of the dataset's group; None for images of unknown dataset.
        paths: Their files.
    """

    name: str
    group: int | None
    paths: Sequence[Path]


def rows_of_words(words: Sequence[str]) -> list[Row]:
    """One row for each folder in which images of a command line lie.

    Args:
        words: Files, folders or patterns; see `find_images`.

    Raises:
        DataError: If one of the words stands for nothing.
    """
    folders: dict[Path, list[Path]] = {}
    for path in find_images(words):
        folders.setdefault(path.absolute().parent, []).append(path)
    names = names_of([*folders])
    rows = zip(names, folders.values(), strict=True)
    return [Row(name, None, paths) for name, paths in rows]


def rows_of_mixture(
    stored: StoredDetector, *, per_dataset: int
) -> tuple[list[Row], list[str]]:
    """Some validation images of each dataset, if they are where they were in training.

    Args:
        stored: The checkpoint; paths of its config are seen from here.
        per_dataset: How many images, evenly over the annotation file.

    Returns:
        A row for each dataset that was found, and a sentence about each other.

    Raises:
        DataError: If there is not a single image.
    """
    rows, notes = [], []
    for name in stored.space.dataset_names:
        try:
            paths = validation_images(stored, name, count=per_dataset)
            rows.append(Row(name, _group(stored.space, name), paths))
        except (ConfigError, DataError) as error:
            notes.append(f"No images of {name}: {error}")
    if not rows:
        raise DataError(
            f"the validation images of {', '.join(stored.space.dataset_names)} are not "
            f"where the training had them (seen from {Path.cwd()}); name some with "
            "--images, a folder for each dataset."
        )
    return rows, notes


def _group(space: LabelSpace, name: str) -> int:
    return space.group_id(space.dataset_id(name))


def validation_images(stored: StoredDetector, name: str, *, count: int) -> list[Path]:
    """Some validation images of a dataset, if they are where they were in training.

    Args:
        stored: The checkpoint; paths of its config are seen from here.
        name: Of the dataset.
        count: How many images, evenly over the annotation file.

    Raises:
        ConfigError: If its entry names no COCO file.
        DataError: If the file, or all of its images, are missing.
    """
    try:
        specs = {spec.name: spec for spec in parse_mixture(stored.mixture)}
    except ConfigError:
        specs = {}
    source = specs[name].coco_source("val") if name in specs else None
    if source is None:
        raise ConfigError("the checkpoint names no COCO file of them; see --images.")
    images = read_coco(source.annotations, name)["images"]
    paths = [source.images / str(image.get("file_name")) for image in images]
    there = [path for path in paths if path.is_file()]
    if not there:
        raise DataError(f"not one of them is in {source.images}.")
    step = max(len(there) / count, 1.0)
    return [there[int(i * step)] for i in range(min(count, len(there)))]
