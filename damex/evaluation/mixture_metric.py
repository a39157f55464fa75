"""MixtureMetric: COCO scores and token routing per dataset, in one pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mmdet.registry import METRICS
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log

from damex.datasets.label_space import LabelSpace
from damex.errors import ConfigError, DataError
from damex.evaluation.coco_scores import ImageResult, coco_scores

__all__ = ["MixtureMetric"]


@METRICS.register_module()
class MixtureMetric(BaseMetric):
    """Average precision per dataset, and where each dataset's tokens went.

    Every sample is stored once, with the dataset it comes from; image ids of different
    datasets never meet. Detections are restricted to the classes that the image's
    dataset annotates.

    Keys: ``<dataset>/AP``, ``<dataset>/AP50`` and so on, ``<dataset>/images``,
    ``<dataset>/boxes``, ``mean/AP``, ``mean/AP50`` (plain mean over datasets, as in the
    DAMEX paper), and for a detector with experts ``<dataset>/own_share`` and
    ``mean/own_share``: the share of tokens in MoE layers whose first expert belongs to
    the dataset's group; ``mean/busiest_share``: the share of all tokens that the
    busiest expert of a layer is the first expert of, mean over layers (1/E is even).

    Args:
        backend: ``faster_coco_eval`` or ``pycocotools``; the first one installed by
            default.
        collect_device: As for every mmengine metric.
    """

    default_prefix = "mixture"

    def __init__(
        self, *, backend: str | None = None, collect_device: str = "cpu"
    ) -> None:
        super().__init__(collect_device=collect_device)
        self.backend = backend

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Store one batch of predictions with their ground truth.

        Raises:
            ConfigError: If a sample does not come from a MixtureDataset.
            DataError: If the detector gives scores that are not finite.
        """
        for sample in data_samples:
            if "dataset_id" not in sample:
                raise ConfigError(
                    "MixtureMetric met a sample without dataset_id; use it with a "
                    "dataset of type='MixtureDataset' in val_dataloader and "
                    "test_dataloader."
                )
            predicted = sample["pred_instances"]
            if not torch.isfinite(predicted["scores"]).all():
                raise DataError(
                    f"the detector gives scores that are not numbers on an image of "
                    f"dataset {sample['dataset_name']!r}; did the training diverge? "
                    "Look at the loss in the log, and try a lower learning rate."
                )
            height, width = sample["ori_shape"][:2]
            result = ImageResult(
                width=int(width),
                height=int(height),
                boxes=predicted["bboxes"].cpu().numpy(),
                scores=predicted["scores"].cpu().numpy(),
                labels=predicted["labels"].cpu().numpy(),
                ground_truth=sample["ground_truth"],
            )
            counts = sample.get("routing_counts") or {}
            tokens_LE = np.array(list(counts.values())) if counts else None
            groups = sample.get("group_experts")
            self.results.append((sample["dataset_id"], result, tokens_LE, groups))

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Scores of every dataset that has samples, and their means."""
        space = LabelSpace.from_metainfo(self.dataset_meta)
        scores: dict[str, float] = {}
        for dataset_id, name in enumerate(space.dataset_names):
            rows = [row for row in results if row[0] == dataset_id]
            if not rows:
                continue
            images = [row[1] for row in rows]
            found = coco_scores(
                images,
                classes={i: space.classes[i] for i in space.valid_labels(dataset_id)},
                backend=self.backend,
            )
            found["images"] = len(images)
            found["boxes"] = sum(len(image.ground_truth) for image in images)
            share = _own_share([row[2:] for row in rows], space.group_id(dataset_id))
            if share is not None:
                found["own_share"] = share
            scores.update({f"{name}/{key}": value for key, value in found.items()})
        scores.update(_means(scores))
        tokens_SLE = [row[2] for row in results if row[2] is not None]
        if tokens_SLE:
            scores["mean/busiest_share"] = _busiest_share(np.sum(tokens_SLE, axis=0))
        print_log(str(scores), logger="current", level=logging.INFO)
        return scores


def _own_share(
    routed: Sequence[tuple[np.ndarray | None, Sequence[Sequence[int]] | None]],
    group: int,
) -> float | None:
    """Share of a dataset's tokens that its own group's experts take.

    Args:
        routed: Token counts (layers, experts) of each image, and the experts of each
            group; None where they are unknown.
        group: That of the dataset.
    """
    own, total, is_known = 0, 0, False
    for tokens_LE, groups in routed:
        if tokens_LE is not None and groups is not None:
            own += tokens_LE[:, list(groups[group])].sum()
            total += tokens_LE.sum()
            is_known = True
    return float(own / max(total, 1)) if is_known else None


def _busiest_share(tokens_LE: np.ndarray) -> float:
    """Tokens of the busiest expert over all tokens, mean over layers."""
    tokens_L = np.maximum(tokens_LE.sum(1), 1)
    return float((tokens_LE.max(1) / tokens_L).mean())


def _means(scores: Mapping[str, float]) -> dict[str, float]:
    """Plain mean over datasets of AP, AP50, AP75 and own_share."""
    columns: dict[str, list[float]] = {}
    for key, value in scores.items():
        columns.setdefault(key.rsplit("/", 1)[1], []).append(value)
    return {
        f"mean/{key}": float(np.nanmean(columns[key]))
        for key in ("AP", "AP50", "AP75", "own_share")
        if key in columns and not np.all(np.isnan(columns[key]))
    }
