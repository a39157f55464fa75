"""Predictions as a COCO document and as a table, and detectors as checkpoints."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from damex.errors import ConfigError
from damex.files import atomic_write, check_file, write_json, write_text
from damex.inference.predictor import Prediction

Add = Callable[[Prediction, str], None]
COLUMNS = (
    *("file", "width", "height", "dataset", "probability"),
    *("class", "score", "x1", "y1", "x2", "y2"),
)


def coco_document(
    found: Sequence[tuple[Prediction, str]], classes: Sequence[str]
) -> dict[str, Any]:
    """Detections as COCO annotations with a ``score``.

    Args:
        found: What was found in each image, and its ``file_name``.
        classes: Of the detector; category ids are their numbers, from 1.

    Returns:
        Images with ``dataset`` and the ``probability`` of the most probable one, where
        the detector says so; boxes as x, y, width, height.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (one, name) in enumerate(found, 1):
        record = dict(id=number, file_name=name, width=one.width, height=one.height)
        images.append({**record, **_about(one)})
        rows = zip(one.boxes.tolist(), one.scores, one.labels, strict=True)
        for (x1, y1, x2, y2), score, label in rows:
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=number,
                    category_id=int(label) + 1,
                    bbox=[round(v, 2) for v in (x1, y1, x2 - x1, y2 - y1)],
                    area=round((x2 - x1) * (y2 - y1), 2),
                    score=round(float(score), 4),
                    iscrowd=0,
                )
            )
    categories = [dict(id=i, name=name) for i, name in enumerate(classes, 1)]
    return dict(images=images, annotations=annotations, categories=categories)


@contextmanager
def json_document(path: Path, classes: Sequence[str]) -> Iterator[Add]:
    """Write the document of `coco_document` at the end.

    After an error or Ctrl-C, it holds what was added before.

    Args:
        path: Of the file.
        classes: Of the detector.

    Yields:
        A function that takes a prediction and the name of its image.
    """
    found: list[tuple[Prediction, str]] = []
    is_over = False
    try:
        yield lambda one, name: found.append((one, name))
        is_over = True
    finally:
        if is_over or found:  # an earlier file is worth more than nothing
            write_json(path, coco_document(found, classes))


@contextmanager
def csv_table(path: Path) -> Iterator[Add]:
    """Write one row per detection, as they come: `COLUMNS`, boxes in pixels.

    After an error or Ctrl-C, it holds what was added before.

    Args:
        path: Of the file, which gets its name at the end.

    Yields:
        A function that takes a prediction and the name of its image.
    """
    stopped: BaseException | None = None
    with (
        atomic_write(path) as part,
        part.open("w", encoding="utf-8", newline="") as file,
    ):
        table, whole = csv.writer(file), 0
        table.writerow(COLUMNS)

        def add(one: Prediction, name: str) -> None:
            nonlocal whole
            table.writerows(_rows(one, name))
            file.flush()
            whole = file.tell()

        try:
            yield add
        except BaseException as error:
            if not whole or isinstance(error, OSError):
                raise
            file.truncate(whole)
            stopped = error
    if stopped is not None:
        raise stopped


def _rows(one: Prediction, name: str) -> list[list[Any]]:
    """The rows of an image, see `COLUMNS`."""
    about = _about(one)
    image = [name, one.width, one.height]
    image += [about.get("dataset", ""), about.get("probability", "")]
    rows = zip(one.names, one.scores, one.boxes.tolist(), strict=True)
    return [
        [*image, found, round(float(score), 4), *(round(value, 2) for value in box)]
        for found, score, box in rows
    ]


def _about(one: Prediction) -> dict[str, Any]:
    """The dataset of an image, and how probable it is, where they are known."""
    known = dict(dataset=one.dataset, probability=one.likeness)
    if one.likeness is not None:
        known["probability"] = round(one.likeness, 4)
    return {key: value for key, value in known.items() if value is not None}


def check_outputs(targets: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Refuse to write over what is read, or twice to one place; make their folders.

    Raises:
        ConfigError: If it would, or a file cannot be written.
    """
    taken = {path.resolve() for path in inputs}
    for target in targets:
        check_file(target)
        if target.resolve() in taken:
            raise ConfigError(
                f"{target} would be replaced, which is an input or another output; "
                "name another file."
            )
        taken.add(target.resolve())


def check_target(
    path: Path, *, suffixes: Sequence[str] = (".pth",), with_config: bool = True
) -> None:
    """Refuse a place for a detector before anything is computed.

    Args:
        path: Of the file.
        suffixes: What it may end in.
        with_config: Whether a config shall be written beside it.

    Raises:
        ConfigError: If it ends in something else, or a file is there already.
    """
    if path.suffix not in suffixes:
        raise ConfigError(f"--out must end in {' or '.join(suffixes)}, got {path}.")
    for file in (path, path.with_suffix(".py")):
        if file.exists() and (with_config or file == path):
            raise ConfigError(f"{file} exists; remove it, or name another --out.")


def write_checkpoint(
    path: Path,
    state: Mapping[str, Tensor],
    *,
    config: str,
    with_config: bool = True,
    **meta: Any,
) -> None:
    """Write a checkpoint whole or not at all, and its config beside it.

    Args:
        path: See `check_target`.
        state: Weights by their names.
        config: Text of the config.
        with_config: Whether to write it beside the checkpoint, too.
        meta: What else the checkpoint says of itself, such as ``dataset_meta``.

    Raises:
        ConfigError: If it cannot be written.
    """
    content = dict(meta=dict(cfg=config, **meta), state_dict=dict(state))
    with atomic_write(path) as part:
        with part.open("wb") as file:
            torch.save(content, file)
        if with_config:
            write_text(path.with_suffix(".py"), config)
