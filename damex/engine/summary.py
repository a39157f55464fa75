"""RunSummaryHook: what a run ends with: a table, a JSON file and a picture."""

from __future__ import annotations

import json
import resource
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.runner import Runner
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table

__all__ = [
    "Panel",
    "RunSummaryHook",
    "draw_panels",
    "score_table",
    "summarise",
]

PACKAGES = (
    "damex",
    "torch",
    "torchvision",
    "onedl-mmdetection",
    "onedl-mmengine",
    "onedl-mmcv",
)
PREFIX = "mixture/"


@HOOKS.register_module()
class RunSummaryHook(Hook):
    """Prints the scores per dataset and writes ``summary.json`` and a picture.

    Args:
        images_per_dataset: Images of each dataset in ``detections.png``; 0 for none.
        min_score: Detections below this confidence are not drawn.
    """

    priority = "VERY_LOW"

    def __init__(self, *, images_per_dataset: int = 2, min_score: float = 0.3) -> None:
        self.images_per_dataset = images_per_dataset
        self.min_score = min_score
        self._console = Console(file=sys.stdout)
        self._created = time.monotonic()
        self._train_seconds = 0.0
        self._train_started: float | None = None
        self._first_iter = 0
        self._val_started = 0.0
        self._val_seconds = 0.0
        self._samples: dict[str, list[Any]] = defaultdict(list)
        self._scores: dict[str, float] = {}

    def before_train(self, runner: Runner) -> None:
        """Start the clock."""
        self._train_started = time.monotonic()
        self._first_iter = runner.iter

    def before_val_epoch(self, runner: Runner) -> None:
        """Forget the images of the evaluation before."""
        self._samples.clear()
        self._val_started = time.monotonic()

    before_test_epoch = before_val_epoch

    def after_val_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Sequence[Any] | None = None,
    ) -> None:
        """Keep the first images of every dataset for the picture."""
        for sample in outputs or ():
            kept = self._samples[sample.metainfo.get("dataset_name", "")]
            if len(kept) < self.images_per_dataset:
                kept.append(sample)

    after_test_iter = after_val_iter

    def after_val_epoch(
        self, runner: Runner, metrics: dict[str, float] | None = None
    ) -> None:
        """Print the table of one evaluation."""
        self._val_seconds += time.monotonic() - self._val_started
        self._report(runner, metrics or {})

    def after_test_epoch(
        self, runner: Runner, metrics: dict[str, float] | None = None
    ) -> None:
        """Print the table and write ``test_summary.json`` and its picture."""
        self._report(runner, metrics or {})
        self._write(runner, prefix="test_", checkpoint=runner._load_from)

    def after_train(self, runner: Runner) -> None:
        """Write the summary of the whole run.

        A run that was stopped between its last checkpoint and its last evaluation has
        nothing to train when it is resumed, and mmengine would leave it unevaluated.
        """
        if runner.iter == self._first_iter and runner.val_loop is not None:
            runner.val_loop.run()
        if self._train_started is not None:
            elapsed = time.monotonic() - self._train_started
            self._train_seconds = elapsed - self._val_seconds
        last = _last_checkpoint(Path(runner.work_dir))
        self._write(runner, prefix="", checkpoint=last)

    def _report(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        self._scores = {
            key.removeprefix(PREFIX): value
            for key, value in metrics.items()
            if key.startswith(PREFIX)
        }
        if runner.rank != 0:
            return
        if self._scores:
            self._console.print(score_table(self._scores))
        for key, value in metrics.items():
            if not key.startswith(PREFIX):
                self._console.print(f"{key}: {value}", highlight=False)

    def _write(self, runner: Runner, *, prefix: str, checkpoint: str | None) -> None:
        """Write the files of a run and say where they are."""
        if runner.rank != 0:
            return
        folder = Path(runner.work_dir)
        found: dict[str, str | None] = dict(
            checkpoint=checkpoint, log=runner.logger.log_file
        )
        if self._scores or self._train_started is not None:
            found["summary"] = self._write_summary(runner, folder, prefix)
        if self._scores:
            found["picture"] = self._draw(runner, folder / f"{prefix}detections.png")
        for name, value in found.items():
            if value:
                self._console.print(f"{name:>10}: {value}", soft_wrap=True)

    def _write_summary(self, runner: Runner, folder: Path, prefix: str) -> str:
        summary = summarise(self._scores)
        if self._train_started is not None:
            summary["train_seconds"] = round(self._train_seconds, 1)
            summary["iterations"] = runner.iter
            summary["peak_memory_mib"] = _peak_memory_mib()
        summary.update(
            total_seconds=round(time.monotonic() - self._created, 1),
            versions=_versions(),
            command=shlex.join(sys.argv),
        )
        path = folder / f"{prefix}summary.json"
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return str(path)

    def _draw(self, runner: Runner, path: Path) -> str | None:
        """Write the picture of detections; None when there is nothing to draw."""
        classes = runner.visualizer.dataset_meta["classes"]
        rows = {
            name: [self._panel(sample, classes) for sample in samples]
            for name, samples in self._samples.items()
            if samples
        }
        if not rows:
            return None
        draw_panels(rows).save(path)
        return str(path)

    def _panel(self, sample: Any, classes: Sequence[str]) -> Panel:
        truth = []
        for record in sample.metainfo.get("ground_truth", ()):
            x, y, w, h = record["bbox"]
            truth.append((classes[record["label"]], (x, y, x + w, y + h)))
        predicted = sample.pred_instances.cpu().numpy()
        found = [
            (classes[label], float(score), box)
            for label, score, box in zip(
                predicted.labels, predicted.scores, predicted.bboxes, strict=True
            )
            if score >= self.min_score
        ]
        return Panel(sample.img_path, truth, found)


def summarise(scores: Mapping[str, float]) -> dict[str, Any]:
    """Arrange the metric's flat keys as ``summary.json`` has them.

    Args:
        scores: ``<dataset>/<score>`` -> value, as MixtureMetric returns them.

    Returns:
        ``mean_ap50``, ``mean_ap``, ``pooled_ap50``, ``pooled_ap`` (all images as one
        dataset, see MixtureMetric), ``datasets`` and, with experts,
        ``routing_accuracy`` and ``max_load``.
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
            name: dict(
                ap=row["AP"],
                ap50=row["AP50"],
                images=int(row["images"]),
                boxes=int(row["boxes"]),
            )
            for name, row in datasets.items()
        },
    )
    shares = {
        n: row["routing_accuracy"]
        for n, row in datasets.items()
        if "routing_accuracy" in row
    }
    if shares:
        summary["routing_accuracy"] = {**shares, "mean": mean.get("routing_accuracy")}
        summary["max_load"] = mean.get("max_load")
    return summary


def score_table(scores: Mapping[str, float]) -> Table:
    """The scores per dataset as a table for the screen."""
    summary = summarise(scores)
    shares = summary.get("routing_accuracy", {})
    table = Table(title="evaluation per dataset", title_justify="left")
    table.add_column("dataset")
    for column in ("images", "boxes", "AP", "AP50", "routing accuracy"):
        table.add_column(column, justify="right")
    for name, row in summary["datasets"].items():
        table.add_row(
            name,
            str(row["images"]),
            str(row["boxes"]),
            _number(row["ap"]),
            _number(row["ap50"]),
            _percent(shares.get(name)),
        )
    table.add_section()
    table.add_row(
        "mean",
        "",
        "",
        _number(summary["mean_ap"]),
        _number(summary["mean_ap50"]),
        _percent(shares.get("mean")),
    )
    pooled = _number(summary["pooled_ap"]), _number(summary["pooled_ap50"])
    table.add_row("pooled", "", "", *pooled, "")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _plain(value: float) -> float | None:
    """A float that JSON can hold; None for nan."""
    return None if np.isnan(value) else round(float(value), 6)


def _versions() -> dict[str, str]:
    """Versions of the packages that numbers depend on."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _peak_memory_mib() -> float:
    """Largest memory so far: of the GPU if there is one, else of this process."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(kibibytes / 2**10, 1)


def _last_checkpoint(folder: Path) -> str | None:
    marker = folder / "last_checkpoint"
    return marker.read_text(encoding="utf-8").strip() if marker.is_file() else None


TRUTH_COLOUR = (40, 170, 60)
FOUND_COLOUR = (225, 60, 50)
INK = (30, 30, 30)
GAP = 8
HEADER = 22


@dataclass(frozen=True)
class Panel:
    """One image with its boxes.

    Args:
        path: The image file.
        truth: (label, (x1, y1, x2, y2)) of annotated objects, in pixels.
        found: (label, score, (x1, y1, x2, y2)) of detections, in pixels.
    """

    path: str
    truth: Sequence[tuple[str, Sequence[float]]]
    found: Sequence[tuple[str, float, Sequence[float]]]


def draw_panels(
    rows: Mapping[str, Sequence[Panel]], *, panel_size: int = 256
) -> Image.Image:
    """Draw a sheet with one row per dataset: annotation left, detections right.

    Args:
        rows: Panels by dataset name.
        panel_size: Longest side of one image on the sheet, in pixels.

    Returns:
        An RGB picture.
    """
    columns = max(len(panels) for panels in rows.values())
    pair = 2 * panel_size + GAP
    width = columns * (pair + GAP) + GAP
    height = len(rows) * (panel_size + HEADER + GAP) + GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    y = GAP
    for name, panels in rows.items():
        title = f"{name}   green: annotated   red: detected"
        draw.text((GAP, y + 4), title, fill=INK, font=ImageFont.load_default(13))
        for column, panel in enumerate(panels):
            x = GAP + column * (pair + GAP)
            boxes = [(label, None, box) for label, box in panel.truth]
            left = _draw_boxes(panel.path, boxes, TRUTH_COLOUR, panel_size)
            right = _draw_boxes(panel.path, panel.found, FOUND_COLOUR, panel_size)
            sheet.paste(left, (x, y + HEADER))
            sheet.paste(right, (x + panel_size + GAP // 2, y + HEADER))
        y += panel_size + HEADER + GAP
    return sheet


def _draw_boxes(
    path: str,
    boxes: Sequence[tuple[str, float | None, Sequence[float]]],
    colour: tuple[int, int, int],
    size: int,
) -> Image.Image:
    """One image, enlarged or reduced to ``size``, with its boxes and names."""
    image = Image.open(path).convert("RGB")
    scale = size / max(image.size)
    shape = [max(1, round(side * scale)) for side in image.size]
    canvas = image.resize((shape[0], shape[1]), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(11)
    for label, score, box in boxes:
        x1, y1, x2, y2 = (np.asarray(box, dtype=float) * scale).tolist()
        draw.rectangle((x1, y1, x2, y2), outline=colour, width=2)
        text = label if score is None else f"{label} {score:.2f}"
        left, top, right, bottom = draw.textbbox((x1, y1), text, font=font)
        shift = min(0.0, canvas.width - right)
        lift = -(bottom - top + 3) if y1 > bottom - top + 3 else 0
        spot = (left + shift, top + lift, right + shift + 2, bottom + lift + 2)
        draw.rectangle(spot, fill=colour)
        draw.text((x1 + shift + 1, y1 + lift), text, fill="white", font=font)
    return canvas
