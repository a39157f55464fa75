"""Where a detector loses AP on each dataset: class names, duplicates, small objects.

Run as ``python tools/analysis/lost_ap.py CONFIG CHECKPOINT``. The columns score the
same detections again:

- ``any class``: all classes count as one, so that only boxes and scores are judged.
- ``NMS``: of detections of a class that overlap by an IoU above 0.7, the best is kept.
- ``side``: the median side of the objects in pixels of the resized image, and the
  fraction of objects below 16 pixels.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from cyclopts import Parameter
from mmengine.registry import METRICS
from rich.console import Console
from torchvision.ops import batched_nms

from damex.datasets.geometry import image_size_of, set_image_size
from damex.datasets.label_space import LabelSpace
from damex.engine.config import build_runner, load_config
from damex.engine.summary import markdown
from damex.evaluation import ImageResult, MixtureMetric, coco_scores
from damex.files import write_json
from damex.workbench.cli.run import CfgOptions, ConfigName, program, run_command

SMALL = 16.0  # pixels of the resized image: two cells of the finest features
NMS_IOU = 0.7
COLUMNS = (
    *("AP", "AP50", "AP75", "AP any class", "AP50 any class", "AP after NMS"),
    *("median side", "below 16 px"),
)

app = program(
    "python tools/analysis/lost_ap.py",
    "Show where a detector loses AP on each dataset.",
    "python tools/analysis/lost_ap.py my_mixture.py epoch_4.pth --out lost.json",
)


def without_names(image: ImageResult) -> ImageResult:
    """Give all detections and objects the label 0."""
    truth = [{**one, "label": 0} for one in image.ground_truth]
    return replace(image, labels=np.zeros_like(image.labels), ground_truth=truth)


def without_duplicates(image: ImageResult) -> ImageResult:
    """Drop detections that overlap a better one of their class."""
    boxes, scores = torch.as_tensor(image.boxes), torch.as_tensor(image.scores)
    kept = batched_nms(boxes, scores, torch.as_tensor(image.labels), NMS_IOU).numpy()
    return replace(
        image,
        boxes=image.boxes[kept],
        scores=image.scores[kept],
        labels=image.labels[kept],
    )


def sides(images: Sequence[ImageResult], size: tuple[int, int]) -> list[float]:
    """Sides of the objects: roots of their areas, in images resized into `size`.

    Args:
        images: With objects in pixels of the original images.
        size: Height and width of the test images, whose aspect ratio is kept.
    """
    found = []
    for image in images:
        scale = min(size[0] / image.height, size[1] / image.width)
        for one in image.ground_truth:
            width, height = one["bbox"][2:]
            found.append(float(width * height) ** 0.5 * scale)
    return found


def row_of(
    images: Sequence[ImageResult], classes: Mapping[int, str], size: tuple[int, int]
) -> dict[str, float]:
    """The columns of one dataset, of which `classes` are annotated."""
    own = [
        replace(
            image,
            boxes=image.boxes[keep],
            scores=image.scores[keep],
            labels=image.labels[keep],
        )
        for image in images
        for keep in [np.isin(image.labels, list(classes))]
    ]
    found = coco_scores(own, classes=classes)
    unnamed = coco_scores([without_names(one) for one in own], classes={0: "object"})
    single = coco_scores([without_duplicates(one) for one in own], classes=classes)
    lengths = sides(own, size)
    values = (
        *(found["AP"], found["AP50"], found["AP75"]),
        *(unnamed["AP"], unnamed["AP50"], single["AP"]),
        statistics.median(lengths),
        statistics.fmean(side < SMALL for side in lengths),
    )
    return dict(zip(COLUMNS, values, strict=True))


@METRICS.register_module(force=True)  # again, where the script runs by its path
class LostAP(MixtureMetric):
    """Scores of `MixtureMetric`, and ``<dataset>/<column>`` for every column.

    Args:
        size: Height and width of the test images.
    """

    def __init__(self, *, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Add the columns of each dataset, from the detections of its classes."""
        space = LabelSpace.from_metainfo(self.dataset_meta)
        scores = super().compute_metrics(results)
        for number, name in enumerate(space.dataset_names):
            images = [row.of_dataset for row in results if row.dataset_id == number]
            if images:
                labels = space.valid_labels(number)
                classes = {label: space.classes[label] for label in labels}
                row = row_of(images, classes, self.size)
                scores |= {f"{name}/{key}": value for key, value in row.items()}
        return scores


@app.default
def main(
    config: ConfigName,
    checkpoint: str,
    /,
    *,
    out: Annotated[str | None, Parameter(help="JSON file for the columns.")] = None,
    cfg_options: CfgOptions = (),
) -> None:
    """Evaluate a checkpoint on the validation images of a config's datasets."""
    cfg = load_config(config, cfg_options=cfg_options)
    cfg.load_from = checkpoint
    cfg.default_hooks = {**(cfg.get("default_hooks") or {}), "checkpoint": None}
    set_image_size(cfg)
    cfg.val_evaluator = dict(type="LostAP", size=image_size_of(cfg)[::-1])
    with tempfile.TemporaryDirectory() as cfg.work_dir:
        found = build_runner(cfg).val()
    rows: dict[str, dict[str, float]] = {}
    for key, value in found.items():
        dataset, _, column = key.removeprefix("mixture/").rpartition("/")
        if column in COLUMNS and dataset not in ("mean", "pooled"):
            rows.setdefault(dataset, {})[column] = value
    rows["mean"] = {
        column: statistics.fmean(row[column] for row in rows.values())
        for column in COLUMNS
    }
    lines = [
        [name, *(f"{row[key]:.{1 if 'side' in key else 3}f}" for key in COLUMNS)]
        for name, row in rows.items()
    ]
    console = Console(markup=False, emoji=False)
    console.print(markdown(["dataset", *COLUMNS], lines), soft_wrap=True)
    if out is not None:
        write_json(Path(out), rows, indent=1)


if __name__ == "__main__":
    sys.exit(run_command(app))
