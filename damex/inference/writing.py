"""Predictions as a COCO document, as a table, and drawn into their images."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mmcv
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from damex.curation.sheets import draw_name, palette
from damex.errors import ConfigError
from damex.inference.predictor import Prediction

COLUMNS = (
    *("file", "width", "height", "dataset", "probability"),
    *("class", "score", "x1", "y1", "x2", "y2"),
)
LINE, TEXT = 200, 60  # an image's longer side over the width of lines, height of text


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


def draw(prediction: Prediction, target: Path, *, classes: Sequence[str]) -> None:
    """Write an image with its detections.

    Args:
        prediction: Of an image file.
        target: Where to write; gets .png behind it where it is neither .jpg nor .png.
        classes: Of the detector; each has its colour.

    Raises:
        ConfigError: If it would replace the image.
    """
    if prediction.path is None:
        raise ValueError("draw: the prediction is of an array, not of a file")
    if target.suffix.lower() not in (".jpg", ".jpeg", ".png"):
        target = target.with_name(f"{target.name}.png")
    if target.exists() and target.samefile(prediction.path):
        raise ConfigError(f"--draw would replace {target}; name another folder.")
    colors = palette(classes)
    # The pixels that the detector looked at: Pillow knows fewer formats, and turns and
    # scales others in its own way.
    image = Image.fromarray(mmcv.imread(str(prediction.path), channel_order="rgb"))
    longer = max(image.size)
    font = ImageFont.load_default(max(longer // TEXT, 12))
    pen = ImageDraw.Draw(image)
    rows = [*zip(prediction.names, prediction.scores, prediction.boxes, strict=True)]
    for found, score, box in rows[::-1]:  # the best on top
        left, top, right, bottom = corner = box.tolist()
        color, width = colors[found], max(longer // LINE, 2)
        pen.rectangle((left, top, right, bottom), outline=color, width=width)
        draw_name(pen, image.size, corner, f"{found} {score:.2f}", color, font)
    make_folder(target.parent)
    image.save(target, quality=92)


def check_draw_folder(folder: Path, images: Sequence[Path]) -> None:
    """Refuse to draw where the images are: a drawing has the name of its image.

    Args:
        folder: Where drawings go.
        images: That shall be drawn.

    Raises:
        ConfigError: If one of them is in the folder, or below it.
    """
    for image in images:
        places = image.resolve().parent, image.parent.resolve()
        if any(place.is_relative_to(folder.resolve()) for place in places):
            raise ConfigError(
                f"--draw would write to {folder}, where {image} lies, and could "
                "replace images; name another folder."
            )


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
