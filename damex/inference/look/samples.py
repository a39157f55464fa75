"""Images for the expert report: from the command line, or from the mixture."""

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
    """Images of one row of the tables.

    Attributes:
        name: Name of the dataset or folder.
        group: Index of the dataset group; None if the dataset is unknown.
    """

    name: str
    group: int | None
    paths: Sequence[Path]


def rows_of_words(words: Sequence[str]) -> list[Row]:
    """Group the images of words (see `find_images`) into one row per folder."""
    folders: dict[Path, list[Path]] = {}
    for path in find_images(words):
        folders.setdefault(path.absolute().parent, []).append(path)
    names = names_of([*folders])
    rows = zip(names, folders.values(), strict=True)
    return [Row(name, None, paths) for name, paths in rows]


def rows_of_mixture(
    stored: StoredDetector, *, per_dataset: int
) -> tuple[list[Row], list[str]]:
    """Sample validation images of each dataset, evenly over the annotation file.

    Paths of the config are relative to the working directory.

    Returns:
        A row for each dataset with images, and a sentence about each missing one.

    Raises:
        DataError: If no image is found.
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
    """Sample ``count`` validation images of a dataset, evenly over the annotation file.

    Paths of the config are relative to the working directory.

    Raises:
        ConfigError: If its entry does not name a COCO file.
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
