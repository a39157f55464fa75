"""AP of a detector that looks at enlarged images through windows of its own size.

Run as ``python -m tools.analysis.windows CONFIG CHECKPOINT``. Data, metric, and all
steps of the pipeline but size and padding are those of ``damex test``. An image with
one window has nothing to merge: with ``--image-size`` of the config, AP is that of
``damex test``; with ``--whole`` in addition, two equal views show what NMS changes.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby, islice, product
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from mmdet.registry import DATASETS
from mmengine.evaluator import Evaluator
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from torch.nn import functional

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
from damex.config_files import config_of
from damex.datasets.tiles import joined, starts
from damex.engine.config import complete_config
from damex.engine.console import filter_console
from damex.engine.summary import markdown, scores_of
from damex.errors import ConfigError
from damex.files import check_file, write_json
from damex.inference.media import detect
from damex.inference.stored import DetectorCheckpoint
from damex.workbench.cli.run import (
    Checkpoint,
    ConfigName,
    PositiveInt,
    Share,
    program,
    run_command,
)

# Detections among all classes, and among those of the image's dataset.
FOUND = ("pred_instances", "dataset_instances")
Numbered = Iterator[tuple[int, Any]]  # with the index of an image
SCORES = ("AP", "AP50", "AP_small", "AP_medium", "AP_large")
app = program(
    "python -m tools.analysis.windows",
    "Evaluate a checkpoint by windows over enlarged images.",
    "python -m tools.analysis.windows work/config.py work/seed1/epoch_2.pth --whole",
)


@dataclass(frozen=True)
class Views:
    """What the detector sees of an image, and how detections are merged by NMS.

    Args:
        size: Side of a window in pixels.
        image_size: Longest side of the images that windows are cut from.
        overlap: Least overlap of neighboring windows, as a part of their side.
        whole: Whether it sees the whole image at the size of a window, too.
        iou: Of two detections of a class with a higher IoU, the better one stays.
    """

    size: PositiveInt = 256
    image_size: PositiveInt = 512
    overlap: Share = 0.25
    whole: bool = False
    iou: Share = 0.5


@app.default
def windows(
    config: ConfigName,
    checkpoint: Checkpoint,
    /,
    *,
    views: Annotated[Views, Parameter(name="*")] = Views(),
    out: Annotated[str | None, Parameter(help="JSON file for the table.")] = None,
) -> None:
    """Print AP by dataset and size of objects, and the time of an image."""
    if out is not None:
        check_file(Path(out))
    filter_console(MMLogger.get_instance("windows"))
    found = evaluate(complete_config(config_of(config))[0], checkpoint, views)
    rows, columns = {**found["datasets"], "mean": found["mean"]}, [*found["mean"]]
    cells = [[name, *(f"{row[c]:.4f}" for c in columns)] for name, row in rows.items()]
    print(f"{checkpoint}: {views}; sizes of objects are those in the original image\n")
    print(markdown(["dataset", *columns], cells))
    print(f"{found['seconds']:.3f} s per image, {torch.get_num_threads()} threads")
    if out is not None:
        facts = dict(config=config, checkpoint=checkpoint, **asdict(views), **found)
        write_json(Path(out), without_nan(facts), indent=2)


def evaluate(cfg: Mapping[str, Any], checkpoint: str, views: Views) -> dict[str, Any]:
    """Detect by windows, and score as ``damex test`` does with a completed config.

    Returns ``datasets`` and ``mean``: `SCORES`, ``images``, ``views`` per image; and
    ``seconds`` per image, with reading and merging.
    """
    init_default_scope("mmdet")
    stored, loader = DetectorCheckpoint.read(checkpoint), cfg["test_dataloader"]
    large = dataset_of(loader, views.image_size, pad=None)
    small = dataset_of(loader, views.size, pad=views.size) if views.whole else None
    if large.metainfo != stored.space.to_metainfo():
        raise ConfigError(f"{checkpoint} has other classes than the config.")
    detector, evaluator = stored.build(), Evaluator(cfg["test_evaluator"])
    evaluator.dataset_meta = large.metainfo
    counts, begin = Counter[str](), time.perf_counter()
    inputs = (
        (index, view)
        for index in range(len(large))
        for view in (*cut(large[index], views), *([small[index]] if small else []))
    )
    detected = detect_all(detector, inputs, batch_size=loader["batch_size"])
    for _, pairs in groupby(detected, key=itemgetter(0)):
        samples = [sample for _, sample in pairs]
        counts[samples[0].dataset_name] += len(samples)
        evaluator.process([joined(samples, views.iou)])
    seconds = (time.perf_counter() - begin) / len(large)
    scores = scores_of(evaluator.evaluate(len(large)))
    rows = {
        name: {key: scores[f"{name}/{key}"] for key in (*SCORES, "images")}
        | dict(views=count / scores[f"{name}/images"])
        for name, count in counts.items()
    }
    columns = {key: [row[key] for row in rows.values()] for key in (*SCORES, "views")}
    known = {
        k: [v for v in column if not math.isnan(v)] for k, column in columns.items()
    }
    mean = {
        key: statistics.fmean(column or [math.nan]) for key, column in known.items()
    }
    return dict(datasets=rows, mean=mean, seconds=seconds)


def without_nan(value: Any) -> Any:
    """Nested values with None for NaN, which is no JSON."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def dataset_of(loader: Mapping[str, Any], scale: int, *, pad: int | None) -> Any:
    """The dataset of a dataloader, its images resized to another longest side."""
    config = copy.deepcopy(dict(loader["dataset"]))
    steps = {step["type"]: step for step in config["pipeline"]}
    if not {"Resize", "Pad"} <= {*steps}:
        raise ConfigError("the test pipeline needs Resize and Pad, as the template.")
    steps["Resize"]["scale"], steps["Pad"]["size"] = (scale, scale), (pad, pad)
    if pad is None:
        config["pipeline"] = [s for s in config["pipeline"] if s["type"] != "Pad"]
    return DATASETS.build(config)


def cut(packed: Mapping[str, Any], views: Views) -> Iterator[dict[str, Any]]:
    """Cut an image into windows, black beyond it; ``corner`` is in original pixels."""
    pixels, size = packed["inputs"], views.size
    sides = (starts(side, size, views.overlap) for side in pixels.shape[1:])
    for top, left in product(*sides):
        window = pixels[:, top : top + size, left : left + size]
        beyond = (0, size - window.shape[2], 0, size - window.shape[1])
        sample = packed["data_samples"].clone()
        across, down = sample.scale_factor
        corner = (left / across, top / down)
        sample.set_metainfo(dict(img_shape=(size, size), corner=corner))
        yield dict(inputs=functional.pad(window, beyond), data_samples=sample)


def detect_all(detector: Any, inputs: Numbered, *, batch_size: int) -> Numbered:
    """Detect in numbered views, with boxes in their image; batches span images."""
    while batch := [*islice(inputs, batch_size)]:
        samples = detect(detector, [view for _, view in batch])
        for (index, _), sample in zip(batch, samples, strict=True):
            for found in map(sample.get, FOUND):
                corner = found.bboxes.new_tensor(sample.get("corner", (0.0, 0.0)))
                found.bboxes = found.bboxes + corner.repeat(2)
            yield index, sample


if __name__ == "__main__":
    sys.exit(run_command(app))
