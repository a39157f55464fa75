"""Additions to mmdet's results: routing losses and counts, boxes of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from damex.moe import RoutingRecord, dropped_counts, routing_hits, top1_expert
from damex.moe.metrics import count_pairs


def routing_losses(records: Mapping[str, RoutingRecord]) -> dict[str, Tensor]:
    """Collect the losses of all MoE layers for mmdet's loss dict.

    Returns:
        ``loss_moe_<name>``: weighted loss, mean over the layers that have it (as in
        DAMEX). ``moe_routing_accuracy``: share of tokens whose first expert belongs to
        their dataset's group, in [0, 1], 0 without tokens of a known group; if the
        layers know groups. ``moe_drop_rate``: share
        of tokens (with k above 1, of token-expert pairs) beyond the experts' capacity,
        if limited. A dropped token has no first expert.
    """
    collected: dict[str, list[Tensor]] = {}
    hits, drops = [], []
    for record in records.values():
        for name, value in record.losses.items():
            collected.setdefault(f"loss_moe_{name}", []).append(value)
        if record.group_ids_V is not None and record.group_experts_GE is not None:
            hits.append(torch.stack([one.sum() for one in routing_hits(record)]))
        if record.assignment.dropped is not None:
            drops.append(torch.stack(dropped_counts(record)))
    result = {name: torch.stack(v).mean() for name, v in collected.items()}
    if hits:
        right, tokens = torch.stack(hits).sum(0)
        result["moe_routing_accuracy"] = right / tokens.clamp_min(1)
    if drops:
        dropped, asked = torch.stack(drops).sum(0)
        result["moe_drop_rate"] = dropped / asked.clamp_min(1)
    return result


def count_tokens_BE(record: RoutingRecord) -> Tensor:
    """Count the tokens of each image by their first expert."""
    packing, expert_V = record.packing, top1_expert(record)
    image_V = packing.spread(torch.arange(packing.num_images, device=expert_V.device))
    size = (packing.num_images, record.num_experts + 1)  # the last: without an expert
    return count_pairs(image_V, expert_V, size)[:, :-1]


def attach_routing(samples: list, records: Mapping[str, RoutingRecord]) -> None:
    """Write the routing of each image into the metainfo of its data sample.

    ``routing_counts`` maps layer names to E token counts; ``group_experts`` lists the
    experts of each dataset group, if known. Dense detectors have no records.
    """
    if not records:
        return
    counts = {name: count_tokens_BE(one).tolist() for name, one in records.items()}
    groups_GE = next(iter(records.values())).group_experts_GE  # same in all layers
    more = {}
    if groups_GE is not None:
        more["group_experts"] = [
            row.nonzero()[:, 0].tolist() for row in groups_GE.cpu()
        ]
    for image, sample in enumerate(samples):
        counted = {name: rows[image] for name, rows in counts.items()}
        sample.set_metainfo(dict(more, routing_counts=counted))


def add_dataset_instances(
    samples: list, outputs: tuple[Tensor, Tensor], head: Any, rescale: bool
) -> None:
    """Add detections restricted to the classes that the image's dataset annotates.

    A head keeps the top detections over all classes, so the scores of other classes are
    masked before. ``outputs`` are the head's logits (layers, B, queries, classes) and
    boxes. Samples without ``annotated_labels`` are left as they are.
    """
    if not all("annotated_labels" in sample for sample in samples):
        return
    logits_LBQC, boxes = outputs
    foreign_BC = logits_LBQC.new_ones(logits_LBQC.shape[1::2], dtype=torch.bool)
    foreign_BC[:, head.num_classes :] = False  # the background of a softmax
    for foreign_C, sample in zip(foreign_BC, samples, strict=True):
        foreign_C[sample.annotated_labels] = False
    masked_LBQC = logits_LBQC.masked_fill(foreign_BC[:, None], float("-inf"))
    metas = [sample.metainfo for sample in samples]
    found = head.predict_by_feat(
        masked_LBQC, boxes, batch_img_metas=metas, rescale=rescale
    )
    for sample, instances in zip(samples, found, strict=True):
        sample.dataset_instances = instances
