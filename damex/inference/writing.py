"""Write predictions as a COCO document or a CSV table, and detectors as checkpoints."""

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
    """Build COCO annotations with a ``score`` from predictions and their ``file_name``.

    Boxes are x, y, width, height; category ids count from 1. Images carry ``dataset``
    and its ``probability`` if predicted.
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
    """Yield a function that adds a prediction and image name to a COCO document.

    The document is written at the end; after an error or Ctrl-C, it is partial.
    """
    found: list[tuple[Prediction, str]] = []
    is_over = False
    try:
        yield lambda one, name: found.append((one, name))
        is_over = True
    finally:
        if is_over or found:  # keep an earlier file rather than empty it
            write_json(path, coco_document(found, classes))


@contextmanager
def csv_table(path: Path) -> Iterator[Add]:
    """Yield a function that writes a prediction and image name to a CSV table.

    One row per detection (`COLUMNS`), boxes in pixels; complete up to an error or
    Ctrl-C.
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
    """The rows of an image, in the order of `COLUMNS`."""
    about = _about(one)
    image = [name, one.width, one.height]
    image += [about.get("dataset", ""), about.get("probability", "")]
    rows = zip(one.names, one.scores, one.boxes.tolist(), strict=True)
    return [
        [*image, found, round(float(score), 4), *(round(value, 2) for value in box)]
        for found, score, box in rows
    ]


def _about(one: Prediction) -> dict[str, Any]:
    """The dataset of an image and its probability, if known."""
    known = dict(dataset=one.dataset, probability=one.likeness)
    if one.likeness is not None:
        known["probability"] = round(one.likeness, 4)
    return {key: value for key, value in known.items() if value is not None}


def check_outputs(targets: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Check output paths and create their folders.

    Raises:
        ConfigError: If an output would overwrite an input or output, or is not
            writable.
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
    """Check the path of a detector (and of its config) before anything is computed.

    Raises:
        ConfigError: If the suffix is wrong, or a file exists already.
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
    """Write a checkpoint and its config, each completely or not at all.

    ``meta`` is further metadata of the checkpoint, such as ``dataset_meta``.

    Raises:
        ConfigError: If a file cannot be written.
    """
    content = dict(meta=dict(cfg=config, **meta), state_dict=dict(state))
    with atomic_write(path) as part:
        with part.open("wb") as file:
            torch.save(content, file)
        if with_config:
            write_text(path.with_suffix(".py"), config)
