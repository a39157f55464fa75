"""RunSummaryHook: the results of a run as a table, a JSON file and a picture."""

from __future__ import annotations

import resource
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mmcv
import numpy as np
import torch
from matplotlib.figure import Figure
from mmdet.registry import HOOKS
from mmdet.structures import DetDataSample
from mmdet.visualization import DetLocalVisualizer
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmengine.structures import InstanceData
from rich.console import Console
from rich.table import Table
from torch import nn

from damex.datasets.label_space import LabelSpace
from damex.datasets.pixels import read_pixels
from damex.datasets.tiles import joined
from damex.engine.hooks import routing_warnings
from damex.engine.resumption import latest_checkpoint
from damex.errors import DataError, printable
from damex.evaluation import SCORE_NAMES
from damex.files import atomic_write, write_json
from damex.models.insertion import moe_blocks

PACKAGES = (
    *("damex", "torch", "torchvision"),
    *("onedl-mmdetection", "onedl-mmengine", "onedl-mmcv"),
)
PREFIX = "mixture/"
IMAGES_PER_DATASET = 2  # in detections.png


@HOOKS.register_module()
class RunSummaryHook(Hook):
    """Print the scores per dataset and write ``summary.json`` and a picture."""

    priority = "VERY_LOW"

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, markup=False, emoji=False)
        self._created = time.monotonic()
        self._train_seconds = 0.0
        self._train_started: float | None = None
        self._first_iter = 0
        self._val_started = 0.0
        self._val_seconds = 0.0
        # By dataset and image: its windows, or a sample of the whole image.
        self._samples: dict[str, dict[Any, list[Any]]] = defaultdict(dict)
        self._scores: dict[str, float] = {}

    def before_train(self, runner: Runner) -> None:
        """Start the clock."""
        self._train_started = time.monotonic()
        self._first_iter = runner.iter

    def before_save_checkpoint(self, runner: Runner, checkpoint: Any) -> None:
        """Remove the summary and picture of an earlier training here."""
        if runner.rank == 0 and not self._first_iter:
            for name in ("summary.json", "detections.png"):
                (Path(runner.work_dir) / name).unlink(missing_ok=True)

    def before_val_epoch(self, runner: Runner) -> None:
        """Clear the images of the previous evaluation."""
        self._samples.clear()
        self._val_started = time.monotonic()

    before_test_epoch = before_val_epoch

    def after_val_iter(
        self, runner: Runner, *_: Any, outputs: Sequence[Any] = (), **__: Any
    ) -> None:
        """Keep the first images of every dataset for the picture."""
        for sample in outputs:
            meta = getattr(sample, "metainfo", {})
            path = meta.get("img_path")  # a pipeline may leave it out
            if path is None or not isinstance(sample, DetDataSample):
                continue
            kept = self._samples[meta.get("dataset_name", "")]
            if path in kept or len(kept) < IMAGES_PER_DATASET:
                kept.setdefault(path, []).append(sample)

    after_test_iter = after_val_iter

    def after_val_epoch(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Print the scores of one evaluation."""
        self._val_seconds += time.monotonic() - self._val_started
        self._scores = scores_of(metrics)
        if runner.rank != 0:
            return
        if self._scores:
            self._console.print(score_table(self._scores))
            for table in class_tables(self._class_scores(runner)):
                self._console.print(table)
            for warning in routing_warnings(runner.model, self._scores):
                runner.logger.warning(warning)
        for key, value in metrics.items():
            if not key.startswith(PREFIX):
                self._console.print(f"{key}: {value}", highlight=False)

    def after_test_epoch(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Print the scores and write ``test_summary.json`` and its picture."""
        self.after_val_epoch(runner, metrics)
        self._write(runner, prefix="test_", checkpoint=runner._load_from)

    def after_train(self, runner: Runner) -> None:
        """Write the summary of the whole run."""
        # A resumed run with nothing left to train may still lack its last evaluation.
        is_done = runner.iter == self._first_iter and not self._scores
        if is_done and runner.val_loop is not None:
            runner.val_loop.run()
        if self._train_started is not None:
            elapsed = time.monotonic() - self._train_started
            self._train_seconds = elapsed - self._val_seconds
        last = None
        with suppress(DataError):  # no checkpoints, but traces of an earlier run
            last = latest_checkpoint(runner.work_dir)
        self._write(runner, prefix="", checkpoint=last)

    def _write(self, runner: Runner, *, prefix: str, checkpoint: str | None) -> None:
        """Write the files of a run and print their paths and the next command."""
        if runner.rank != 0:
            return
        folder = Path(runner.work_dir)
        found: dict[str, Any] = dict(checkpoint=checkpoint, log=runner.logger.log_file)
        if self._scores or self._train_started is not None:
            found["summary"] = folder / f"{prefix}summary.json"
            write_json(found["summary"], self._summary(runner), indent=2)
        samples = {
            name: [joined(parts) for parts in kept.values()]
            for name, kept in self._samples.items()
        }
        if self._scores and samples:
            found["picture"] = folder / f"{prefix}detections.png"
            meta = runner.visualizer.dataset_meta
            with atomic_write(found["picture"]) as part:
                draw_detections(samples, meta).savefig(part, dpi=100)
        if checkpoint and not prefix and moe_blocks(runner.model):
            found["experts"] = shlex.join(["damex", "experts", checkpoint])
        for name, value in found.items():
            if value:
                self._console.print(f"{name:>10}: {value}", soft_wrap=True)

    def _class_scores(self, runner: Runner) -> dict[str, Any]:
        if not any("/AP_class_" in key for key in self._scores):
            return {}
        space = LabelSpace.from_metainfo(runner.visualizer.dataset_meta)
        return class_scores(self._scores, space)

    def _summary(self, runner: Runner) -> dict[str, Any]:
        summary = {**summarise(self._scores), **self._class_scores(runner)}
        if warnings := routing_warnings(runner.model, self._scores):
            summary["warnings"] = warnings
        if self._train_started is not None:
            summary["train_seconds"] = round(self._train_seconds, 1)
            summary["iterations"] = runner.iter
            # train_seconds covers only these; fewer than iterations if resumed.
            summary["trained_iterations"] = runner.iter - self._first_iter
            summary["peak_memory_mib"] = _peak_memory_mib()
            summary["config"] = runner.written_config.name
            summary["checkpoint"] = _best_or_last(runner)
        return dict(
            summary,
            total_seconds=round(time.monotonic() - self._created, 1),
            device=_device_of(runner.model),
            versions=versions(),
            command=shlex.join(sys.argv),
        )


def _device_of(model: nn.Module) -> str:
    """Name of the GPU that a model is on, or "cpu"."""
    device = next(model.parameters(), torch.empty(0)).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _best_or_last(runner: Runner) -> str | None:
    """The checkpoint to use, as this training knows it; in the work directory, a name.

    The folder may also hold best checkpoints of an earlier training.
    """
    known = runner.message_hub.runtime_info
    found = [known[name] for name in sorted(known) if name.startswith("best_ckpt")]
    with suppress(DataError):
        found.append(latest_checkpoint(runner.work_dir))
    for path in filter(None, found):
        here = Path(runner.work_dir) / Path(path).name
        if here.is_file():
            return here.name
        if "://" in path or Path(path).is_file():
            return str(path)
    return None


def scores_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select MixtureMetric's scores among the metrics, without their prefix."""
    return {
        k.removeprefix(PREFIX): v for k, v in metrics.items() if k.startswith(PREFIX)
    }


def summarise(scores: Mapping[str, float]) -> dict[str, Any]:
    """Arrange MixtureMetric's flat ``<dataset>/<score>`` values as in ``summary.json``.

    ``pooled`` scores are over all images as one dataset.
    """
    datasets: dict[str, dict[str, Any]] = {}
    for key, value in scores.items():
        name, score = key.rsplit("/", 1)
        datasets.setdefault(name, {})[score] = _plain(value)
    mean, pooled = datasets.pop("mean", {}), datasets.pop("pooled", {})
    summary: dict[str, Any] = dict(
        mean_ap50=mean.get("AP50"),
        mean_ap=mean.get("AP"),
        pooled_ap50=pooled.get("AP50"),
        pooled_ap=pooled.get("AP"),
        datasets={
            name: {key.lower(): row.get(key) for key in SCORE_NAMES}
            | {key: int(row[key]) for key in ("images", "boxes")}
            for name, row in datasets.items()
        },
    )
    rows, key = {**datasets, "mean": mean}, "routing_accuracy"
    shares = {name: row[key] for name, row in rows.items() if key in row}
    if shares:
        summary |= {key: shares, "max_load": mean.get("max_load")}
    return summary


def class_scores(scores: Mapping[str, float], space: LabelSpace) -> dict[str, Any]:
    """Arrange the scores of ``MixtureMetric(classwise=True)`` by name.

    Returns:
        ``classes``: AP of each class, by dataset; ``confusion``: number of images of
        each dataset by the dataset group whose experts they went to. Empty without.
    """
    found: dict[str, Any] = {}
    for key, value in scores.items():
        name, score = key.rsplit("/", 1)
        kind, _, number = score.rpartition("_")
        if kind == "AP_class" and name != "pooled":
            rows = found.setdefault("classes", {}).setdefault(name, {})
            rows[space.classes[int(number)]] = _plain(value)
        elif kind == "confusion":
            rows = found.setdefault("confusion", {}).setdefault(name, {})
            rows[space.group_names[int(number)]] = int(value)
    return found


def class_tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yield tables of `class_scores` for the screen."""
    if "classes" in found:
        table = Table("dataset", "class", title="AP per class", title_justify="left")
        table.add_column("AP", justify="right")
        for name, row in found["classes"].items():
            for one, value in row.items():
                table.add_row(printable(name), printable(one), _number(value))
            table.add_section()
        yield table
    if "confusion" in found:
        groups = dict.fromkeys(g for row in found["confusion"].values() for g in row)
        title = "images by the dataset whose experts they went to"
        table = Table("images of", title=title, title_justify="left")
        for group in groups:
            table.add_column(printable(group), justify="right")
        for name, row in found["confusion"].items():
            counts = (str(row.get(group, 0)) for group in groups)
            table.add_row(printable(name), *counts)
        yield table


def score_table(scores: Mapping[str, float]) -> Table:
    """Return the scores per dataset as a table for the screen."""
    summary = summarise(scores)
    shares = summary.get("routing_accuracy", {})
    table = Table(title="evaluation per dataset", title_justify="left")
    table.add_column("dataset")
    for column in ("images", "boxes", "AP", "AP50", "routing accuracy"):
        table.add_column(column, justify="right")
    for name, row in summary["datasets"].items():
        counts = str(row["images"]), str(row["boxes"])
        scored = _number(row["ap"]), _number(row["ap50"])
        share = _number(shares.get(name), ".1%")
        table.add_row(printable(name), *counts, *scored, share)
    table.add_section()
    for name, share in (("mean", _number(shares.get("mean"), ".1%")), ("pooled", "")):
        scored = _number(summary[f"{name}_ap"]), _number(summary[f"{name}_ap50"])
        table.add_row(name, "", "", *scored, share)
    return table


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _number(value: float | None, style: str = ".3f") -> str:
    return "-" if value is None else f"{value:{style}}"


def _plain(value: float) -> float | None:
    """Round a float for JSON; None for nan."""
    return None if np.isnan(value) else round(float(value), 6)


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    with suppress(PackageNotFoundError):  # of its detectors alone
        found["transformers"] = version("transformers")
    return found


def _peak_memory_mib() -> float:
    """Memory that torch reserves on a GPU, else the peak of this process."""
    # LoggerHook resets the peaks; reserved memory does not shrink.
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_reserved() / 2**20, 1)
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes on macOS, else kibibytes
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def draw_detections(
    samples: Mapping[str, Sequence[DetDataSample]],
    dataset_meta: Mapping[str, Any],
    *,
    size: int = 384,
) -> Figure:
    """Draw a row of images per dataset: annotations left, detections right.

    Args:
        samples: Predictions by dataset, with annotations in the metainfo as
            ``ground_truth`` (see MixtureDataset).
        dataset_meta: ``classes``, and optionally ``palette``.
        size: Longer side of the drawn images, in pixels.
    """
    visualizer = DetLocalVisualizer(name="summary")
    visualizer.dataset_meta = dict(dataset_meta)
    columns = max(len(row) for row in samples.values())
    figure = Figure(figsize=(6.5 * columns, 3.4 * len(samples)), layout="constrained")
    grid = figure.subplots(len(samples), columns, squeeze=False)
    for (name, row), panels in zip(samples.items(), grid, strict=True):
        panels[0].set_title(f"{name}: annotated | detected", loc="left")
        for panel in panels:
            panel.set_axis_off()
        for sample, panel in zip(row, panels, strict=False):
            image = read_pixels(sample.img_path).image[..., ::-1]
            scale = size / max(image.shape[:2])
            height, width = (max(1, round(scale * side)) for side in image.shape[:2])
            large = mmcv.imresize(image, (width, height))
            drawn = _scaled(sample, scale, large.shape)
            visualizer.add_datasample(name, large, drawn, pred_score_thr=0.3)
            panel.imshow(visualizer.get_image())
    return figure


def _scaled(sample: DetDataSample, scale: float, shape: Sequence[int]) -> DetDataSample:
    """Scale the annotations and detections of an image to ``shape``.

    Detections may reach into the padding; matplotlib would shrink the image for them.
    """
    records = sample.metainfo.get("ground_truth", ())
    corners = [(x, y, x + w, y + h) for x, y, w, h in (r["bbox"] for r in records)]
    found = sample.pred_instances.cpu()
    sides_4 = found.bboxes.new_tensor([*shape[1::-1]] * 2)
    return DetDataSample(
        gt_instances=InstanceData(
            bboxes=scale * torch.tensor(corners).reshape(-1, 4),
            labels=torch.tensor([r["label"] for r in records], dtype=torch.long),
        ),
        pred_instances=InstanceData(
            bboxes=(scale * found.bboxes).clamp(0 * sides_4, sides_4),
            scores=found.scores,
            labels=found.labels,
        ),
    )
