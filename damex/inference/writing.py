"""Predictions as a COCO document and as a table, and detectors as checkpoints."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from damex.errors import ConfigError
from damex.inference.predictor import Prediction

COLUMNS = (
    *("file", "width", "height", "dataset", "probability"),
    *("class", "score", "x1", "y1", "x2", "y2"),
)


def coco_document(
    predictions: Sequence[Prediction], names: Sequence[str], classes: Sequence[str]
) -> dict[str, Any]:
    """Detections as COCO annotations with a ``score``.

    Args:
        predictions: One per image.
        names: ``file_name`` of each image.
        classes: Of the detector; category ids are their numbers, from 1.

    Returns:
        Images with ``dataset`` and the ``probability`` of the most probable one, where
        the detector says so; boxes as x, y, width, height.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (one, name) in enumerate(zip(predictions, names, strict=True), 1):
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


def _about(one: Prediction) -> dict[str, Any]:
    """The dataset of an image, and how probable it is, where they are known."""
    known = dict(dataset=one.dataset, probability=one.likeness)
    if one.likeness is not None:
        known["probability"] = round(one.likeness, 4)
    return {key: value for key, value in known.items() if value is not None}


def write_json(
    path: Path,
    predictions: Sequence[Prediction],
    names: Sequence[str],
    classes: Sequence[str],
) -> None:
    """Write the document of `coco_document`."""
    make_folder(path.parent)
    document = coco_document(predictions, names, classes)
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def write_csv(
    path: Path, predictions: Sequence[Prediction], names: Sequence[str]
) -> None:
    """Write one row per detection: `COLUMNS`, boxes in pixels."""
    make_folder(path.parent)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for one, name in zip(predictions, names, strict=True):
            about = _about(one)
            image = [name, one.width, one.height]
            image += [about.get("dataset", ""), about.get("probability", "")]
            rows = zip(one.names, one.scores, one.boxes.tolist(), strict=True)
            for found, score, box in rows:
                corners = [round(value, 2) for value in box]
                table.writerow([*image, found, round(float(score), 4), *corners])


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
        path: Its folder is made; see `check_target`.
        state: Weights by their names.
        config: Text of the config.
        with_config: Whether to write it beside the checkpoint, too.
        meta: What else the checkpoint says of itself, such as ``dataset_meta``.

    Raises:
        ConfigError: If the folder cannot be made.
    """
    make_folder(path.parent)
    part = path.with_name(f"{path.name}.part")
    torch.save(dict(meta=dict(cfg=config, **meta), state_dict=dict(state)), part)
    if with_config:
        path.with_suffix(".py").write_text(config, encoding="utf-8")
    part.replace(path)


def check_file(path: Path) -> None:
    """Make the folder of a file before anything is computed.

    Args:
        path: What is there already will be replaced.

    Raises:
        ConfigError: If no file can be there.
    """
    make_folder(path.parent)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file to write to.")


def make_folder(folder: Path) -> None:
    """Make a folder to write to.

    Raises:
        ConfigError: If it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error.strerror}); name another folder."
        ) from error
