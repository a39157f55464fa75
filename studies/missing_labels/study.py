"""Missing labels are not negatives (Yao et al. 2020, arXiv 2001.04621).

Two worlds of the toy generator agree in what they call things, and the second one
annotates all words but one. Its validation images have all labels, so that it can be
counted how many of these objects a detector finds there, trained with the naive loss
and with ``ignore_unannotated_classes``.

Recall is among the ten best detections of an image, of all classes, and needs no
threshold: an image shows two to six objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from mmdet.structures.bbox import bbox_overlaps
from mmengine.config import Config
from mmengine.dataset import pseudo_collate

from damex.config_files import read_config
from damex.datasets.label_space import LabelSpace
from damex.datasets.mixture import MixtureDataset
from damex.datasets.spec import parse_mixture
from damex.engine.config import build_runner
from damex.engine.hooks import bare_model
from damex.evaluation import ImageResult, coco_scores
from damex.workbench.toydata import generate_toy_mixture
from studies.harness import Session
from studies.report import Row, StudyResult, checked, differences, unjudged
from studies.worlds import world_specs

CONFIG = "worlds/worlds-2_missing-labels"
WORK_DIR = Path("work_dirs/missing_labels")
SEEDS = 3
BEST = 10
BATCH = 8
NAIVE, MASKED = "naive", "masked"
GAIN = 0.2  # of all objects of the class; far beyond what seeds differ by


@dataclass(frozen=True)
class Measured:
    """What one training led to, in [0, 1].

    Attributes:
        recall: By dataset: share of the objects of the class that were found.
        ap50: By dataset: AP50 of the class.
        others: By dataset: mean AP50 of all other classes.
    """

    recall: Mapping[str, float]
    ap50: Mapping[str, float]
    others: Mapping[str, float]


def run(session: Session) -> StudyResult:
    """Run the study."""
    cfg = _config(session)
    full, partly, word = _datasets_of(cfg)
    seeds = session.seed_range(1 if session.quick else SEEDS)
    jobs = [(arm, seed) for seed in seeds for arm in (NAIVE, MASKED)]
    found = session.run(jobs, partial(_measure, cfg, word), "trainings")
    rows = _rows(found, full, partly, word)
    gain = differences(*(_of(found[arm], "recall", partly) for arm in (MASKED, NAIVE)))
    return StudyResult(
        title="Missing labels are not negatives (Yao et al. 2020, arXiv 2001.04621)",
        rows=unjudged(rows) if session.quick else rows,
        figure=_figure(found, full, partly, word),
        settings={
            "config": CONFIG,
            "iterations": _iterations(cfg),
            "class without labels": f"{word}, in {partly}",
        },
        remark=(
            f"Masked, {100 * fmean(gain):+.0f} points of recall of {word} on images of "
            f"{partly}."
        ),
    )


def _config(session: Session) -> Config:
    """The config, with its data drawn where they are missing."""
    cfg = read_config(CONFIG)
    if session.quick:
        cfg.train_dataloader.sampler.samples_per_epoch = 10 * BATCH
        cfg.max_epochs = 1
    cfg.train_cfg.val_begin = cfg.max_epochs + 1  # measured here, and once
    cfg.default_hooks.checkpoint.pop("save_best", None)
    cfg.default_hooks.checkpoint.max_keep_ckpts = 1
    root = Path(cfg.mixture[0]["data_root"]).parent
    if not root.exists():
        generate_toy_mixture(root, specs=world_specs(8, names="agreeing", num_val=40))
    return cfg


def _iterations(cfg: Config) -> int:
    return cfg.max_epochs * cfg.train_dataloader.sampler.samples_per_epoch // BATCH


def _datasets_of(cfg: Config) -> tuple[str, str, str]:
    """The dataset with all labels, the other, and the class that it lacks."""
    full, partly = parse_mixture(cfg.mixture)
    (word,) = set(full.own_classes) - set(partly.own_classes)
    return full.name, partly.name, word


def _measure(cfg: Config, word: str, arm: str, seed: int) -> Measured:
    """Train one detector, and look for objects in images with all labels."""
    cfg = deepcopy(cfg)
    cfg.model.ignore_unannotated_classes = arm == MASKED
    cfg.randomness = dict(seed=seed)
    cfg.work_dir = str(WORK_DIR / f"{arm}-seed{seed}")
    cfg.launcher = "none"
    runner = build_runner(cfg)
    runner.train()
    detector = bare_model(runner).eval()
    entries = [{k: v for k, v in e.items() if k != "classes"} for e in cfg.mixture]
    trained = LabelSpace.from_metainfo(runner.train_dataloader.dataset.metainfo)
    labels = trained.classes.index(word)
    measured: dict[str, dict[str, float]] = dict(recall={}, ap50={}, others={})
    for entry in entries:
        images = _detect(detector, entry, trained.classes, cfg.test_pipeline)
        name = entry["name"]
        measured["recall"][name] = found_share(images, labels)
        rest = {k: v for k, v in enumerate(trained.classes) if k != labels}
        for key, classes in (("ap50", {labels: word}), ("others", rest)):
            measured[key][name] = coco_scores(images, classes=classes)["AP50"]
    return Measured(**measured)


def _detect(
    detector: Any, entry: Mapping[str, Any], classes: Sequence[str], pipeline: Any
) -> list[ImageResult]:
    """Detections among all classes in a dataset's validation images."""
    dataset = MixtureDataset(datasets=[entry], split="val", pipeline=pipeline)
    order = [classes.index(name) for name in dataset.metainfo["classes"]]
    results = []
    for start in range(0, len(dataset), BATCH):
        stop = min(start + BATCH, len(dataset))
        batch = pseudo_collate([dataset[index] for index in range(start, stop)])
        with torch.no_grad():
            samples = detector.test_step(batch)
        for sample in samples:
            found = sample.pred_instances
            results.append(
                ImageResult(
                    boxes=found.bboxes.numpy(force=True),
                    scores=found.scores.numpy(force=True),
                    labels=found.labels.numpy(force=True),
                    ground_truth=[
                        {**one, "label": order[one["label"]]}
                        for one in sample.ground_truth
                    ],
                )
            )
    return results


def found_share(images: Sequence[ImageResult], label: int) -> float:
    """Share of a class's objects that one of the best detections is right about.

    IoU 0.5 or more with a detection of the class that is among the ``BEST`` of its
    image; nan without objects.
    """
    hits: list[bool] = []
    for image in images:
        best = np.argsort(-image.scores, kind="stable")[:BEST]
        kept = best[image.labels[best] == label]
        for truth in image.ground_truth:
            if truth["label"] != label:
                continue
            x, y, width, height = truth["bbox"]
            box = torch.tensor([[x, y, x + width, y + height]], dtype=torch.float)
            overlaps = bbox_overlaps(box, torch.as_tensor(image.boxes[kept]).float())
            hits.append(bool((overlaps >= 0.5).any()))
    return float(np.mean(hits)) if hits else float("nan")


def _of(measured: Sequence[Measured], key: str, dataset: str) -> list[float]:
    return [getattr(one, key)[dataset] for one in measured]


def _rows(
    found: Mapping[str, Sequence[Measured]], full: str, partly: str, word: str
) -> list[Row]:
    rows = [
        Row(f"{title}, images of {name}", "-", _of(found[arm], key, name), settings=arm)
        for key, title in (
            ("recall", f"recall of {word} in the {BEST} best"),
            ("ap50", f"AP50 of {word}"),
            ("others", "AP50 of the other classes"),
        )
        for name in (partly, full)
        for arm in (NAIVE, MASKED)
    ]
    gain = differences(*(_of(found[arm], "recall", partly) for arm in (MASKED, NAIVE)))
    name = f"gain of recall of {word}, images of {partly}"
    return [*rows, checked(name, gain, f">= {GAIN}, each seed", lambda x: x >= GAIN)]


def _figure(
    found: Mapping[str, Sequence[Measured]], full: str, partly: str, word: str
) -> Figure:
    """Recall of the class by dataset and arm; a dot per seed."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    cases = [(name, arm) for name in (full, partly) for arm in (NAIVE, MASKED)]
    for place, (name, arm) in enumerate(cases):
        values = _of(found[arm], "recall", name)
        axes.bar(place, fmean(values), color="#9fb8c9" if arm == NAIVE else "#2a6f97")
        axes.plot([place] * len(values), values, "o", color="black", markersize=4)
    axes.set_xticks(range(len(cases)), [f"{name}\n{arm}" for name, arm in cases])
    axes.set(ylabel=f"recall of {word}", ylim=(0, 1))
    axes.set_title(f"{partly} does not annotate {word}")
    return figure
