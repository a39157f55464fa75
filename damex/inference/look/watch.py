"""Record the routing of a detector on images: counts, and experts by image region.

Axes: B images, N tokens per image, V real tokens, E experts, R rows of the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dataset import pseudo_collate
from PIL import Image
from torch import Tensor

from damex.errors import ConfigError, DataError
from damex.inference.images import Inputs
from damex.inference.look.samples import Row
from damex.inference.stored import StoredDetector
from damex.models.detectors import RoutedDetector
from damex.models.insertion import moe_blocks
from damex.models.outputs import count_tokens_BE
from damex.moe import LayerTally, RoutingRecord, add_tallies, top1_expert

TILE = 192  # longer side of pictures in pixels


@dataclass(frozen=True)
class Example:
    """An image and the experts of its regions.

    Attributes:
        row: Index of its row.
        picture: Downscaled input of the detector.
        regions: For each encoder layer and level (finest first), the expert at each
            pixel of the picture; E for none. If tokens vote, the expert each votes for.
        elected: For each voting layer, the experts that took all tokens.
    """

    row: int
    path: Path
    picture: Image.Image
    regions: Mapping[str, Sequence[np.ndarray]]
    elected: Mapping[str, Sequence[int]]


@dataclass
class Watched:
    """Routes of all images.

    Attributes:
        served: Per layer, the tokens of each row by the expert that took them.
        chosen: Per layer, the choices of single tokens if images keep to one group.
        examples: The first images of each row.
    """

    served: dict[str, LayerTally] = field(default_factory=dict)
    chosen: dict[str, LayerTally] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)


class Watcher:
    """Runs a detector on images and records its routing.

    Raises:
        ConfigError: If it has no routed experts, or the device is missing.
    """

    def __init__(self, stored: StoredDetector, *, device: str) -> None:
        self.detector: Any = stored.build(device)
        if not any(
            not getattr(b, "is_dense", False) for b in moe_blocks(self.detector)
        ):
            raise ConfigError(
                f"the detector in {stored.path} has no mixture of experts that routes "
                "tokens, so that there is nothing to look into; damex predict and "
                "damex test show what it finds."
            )
        self._inputs = Inputs(stored.pipeline)
        self._records: dict[str, RoutingRecord] = {}
        self._levels: list[tuple[int, int]] = []

    def watch(
        self,
        rows: Sequence[Row],
        *,
        examples_per_row: int,
        batch_size: int,
        advance: Callable[[], Any],
    ) -> tuple[Watched, list[str]]:
        """Run the detector on images and call ``advance`` after each.

        Returns:
            The routes with up to ``examples_per_row`` examples, and a sentence about
            each unreadable image.

        Raises:
            DataError: If no image can be read.
        """
        found, faults = Watched(), list[str]()
        kept = [0] * len(rows)
        loaded = self._loaded(rows, faults)
        while batch := list(islice(loaded, batch_size)):
            self._run([packed for _, _, packed in batch])
            self._count(found, [row for row, _, _ in batch], rows)
            for image, (row, path, packed) in enumerate(batch):
                advance()
                if kept[row] < examples_per_row:
                    kept[row] += 1
                    found.examples.append(self._example(image, row, path, packed))
        if not found.served:
            raise DataError(f"no image can be read: {'; '.join(faults)}")
        return found, faults

    def _loaded(
        self, rows: Sequence[Row], faults: list[str]
    ) -> Iterator[tuple[int, Path, dict[str, Any]]]:
        """Row index, file and input of each readable image."""
        for number, row in enumerate(rows):
            for path in row.paths:
                try:
                    packed = self._inputs(path)
                except DataError as error:
                    faults.append(str(error))
                    continue
                if row.group is not None:  # only moe.oracle reads it
                    packed["data_samples"].set_metainfo(dict(group_id=row.group))
                yield number, path, packed

    def _run(self, batch: list[dict[str, Any]]) -> None:
        """Run the detector, and keep its routing records and feature sizes."""
        detector = self.detector
        records, levels = self._records, self._levels
        records.clear()
        levels.clear()

        def keep_levels(*call: Any) -> None:
            levels.extend(tuple(map_BCHW.shape[-2:]) for map_BCHW in call[2])

        def keep_records(*_: Any) -> None:
            records.update(detector.routing.records)

        with (
            torch.inference_mode(),
            getattr(detector, "neck", detector.backbone).register_forward_hook(
                keep_levels
            ),
            detector.bbox_head.register_forward_hook(keep_records),
        ):
            samples = detector.test_step(pseudo_collate(batch))
        self._shape = samples[0].batch_input_shape

    def _count(self, found: Watched, numbers: list[int], rows: Sequence[Row]) -> None:
        """Add the routes of a batch to the rows of its images."""
        for name, record in self._records.items():
            row_B = torch.tensor(numbers, device=record.logits_VE.device)
            mine = dataclasses.replace(
                record,
                group_ids_V=record.packing.spread(row_B),
                group_experts_GE=_experts_of_rows(record.group_experts_GE, rows),
                is_forced=False,
            )
            tally = LayerTally.of(mine, num_groups=len(rows))
            add_tallies(found.served, {name: tally})
            if _is_kept_to_a_group(record):
                own = dataclasses.replace(mine, is_forced=True)
                tally = LayerTally.of(own, num_groups=len(rows))
                add_tallies(found.chosen, {name: tally})

    def _example(
        self, image: int, row: int, path: Path, packed: Mapping[str, Any]
    ) -> Example:
        """Picture and regions of one image of the batch."""
        rgb_CHW = packed["inputs"].flip(0).float().clamp(0, 255).to(torch.uint8)
        picture = Image.fromarray(rgb_CHW.permute(1, 2, 0).numpy())
        seen = picture.size
        scale = TILE / max(seen)
        picture = picture.resize([max(round(side * scale), 1) for side in seen])
        regions, elected = {}, {}
        for name, record in self._records.items():
            is_kept = _is_kept_to_a_group(record)
            if is_kept:
                elected[name] = _experts_of(record, image)
            if name.startswith("encoder."):
                expert_V = (
                    record.logits_VE.argmax(1) if is_kept else top1_expert(record)
                )
                expert_BN = record.packing.unpack(expert_V, fill=record.num_experts)
                regions[name] = self._maps(expert_BN[image], picture.size, scale)
        return Example(row, path, picture, regions, elected)

    def _maps(
        self, expert_N: Tensor, size: tuple[int, int], scale: float
    ) -> list[np.ndarray]:
        """Expert maps in picture size per level; ``scale``: picture over input size."""
        lengths = [height * width for height, width in self._levels]
        if sum(lengths) != len(expert_N):
            return []  # the encoder's tokens differ from the neck's
        maps = []
        for part, level in zip(
            expert_N.cpu().split(lengths), self._levels, strict=True
        ):
            places = [
                # Rounding may make the picture half a pixel larger than the input.
                ((np.arange(side) + 0.5) / scale * cells / whole)
                .astype(int)
                .clip(max=cells - 1)
                for side, cells, whole in zip(
                    size[::-1], level, self._shape, strict=True
                )
            ]
            maps.append(part.view(level).numpy()[np.ix_(*places)])
        return maps


def _is_kept_to_a_group(record: RoutingRecord) -> bool:
    """Whether a vote or a given dataset restricts the choice of single tokens."""
    return record.votes_BG is not None or record.is_forced


def _experts_of(record: RoutingRecord, image: int) -> list[int]:
    """The experts that took tokens of an image."""
    return count_tokens_BE(record)[image].nonzero().flatten().tolist()


def _experts_of_rows(map_GE: Tensor | None, rows: Sequence[Row]) -> Tensor | None:
    """Mask of the experts allowed for each row's dataset; None if one is unknown."""
    groups = [row.group for row in rows]
    if map_GE is None or None in groups:
        return None
    return map_GE[torch.tensor(groups, device=map_GE.device)]


def kinds_of(detector: RoutedDetector) -> dict[str, str]:
    """Describe the gate and experts of each layer with experts."""
    return {
        block.name: f"{type(block.moe.gate).__name__}, "
        f"{block.moe.num_experts} {type(block.moe.experts).__name__}"
        for block in moe_blocks(detector)
    }
