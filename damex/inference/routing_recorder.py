"""Record the routing of a detector on images: counts, and experts by image region.

Axes: N tokens per image, V real tokens, E experts, G dataset groups or rows of tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from damex.errors import ConfigError, DataError
from damex.inference.stored import Inputs, StoredDetector, detect
from damex.models.insertion import moe_blocks
from damex.models.outputs import count_tokens_BE
from damex.moe import LayerTally, RoutingRecord, add_tallies, top1_expert

TILE = 192  # longer side of pictures in pixels


@dataclass(frozen=True)
class Row:
    """Images of one row of the tables; ``group`` is None if the dataset is unknown."""

    name: str
    group: int | None
    paths: Sequence[Path]


@dataclass(frozen=True)
class Example:
    """An image and the experts of its regions.

    Attributes:
        row: Name of its row.
        picture: Downscaled input of the detector.
        regions: For each encoder layer and level (finest first), the expert at each
            pixel of the picture; E for none. If tokens vote, the expert each votes for.
        elected: For each voting layer, the experts that took all tokens.
    """

    row: str
    path: Path
    picture: Image.Image
    regions: Mapping[str, Sequence[np.ndarray]]
    elected: Mapping[str, Sequence[int]]


@dataclass
class Recorded:
    """Routes of all images.

    Attributes:
        served: Per layer, the tokens of each row by the expert that took them.
        chosen: Per layer, the choices of single tokens if images keep to one group.
        examples: The first images of each row.
        faults: A sentence about each unreadable image.
    """

    served: dict[str, LayerTally] = field(default_factory=dict)
    chosen: dict[str, LayerTally] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Recorder:
    """Runs a detector on images and records its routing.

    Raises:
        ConfigError: If it has no routed experts, or the device is missing.
    """

    def __init__(self, stored: StoredDetector, *, device: str) -> None:
        self.detector: Any = stored.build(device)
        blocks = moe_blocks(self.detector)
        if all(getattr(block, "is_dense", False) for block in blocks):
            raise ConfigError(
                f"the detector in {stored.path} has no mixture of experts that routes "
                "tokens; damex predict and damex test show what it detects."
            )
        self._inputs = Inputs(stored.pipeline)
        self._records: dict[str, RoutingRecord] = {}
        self._levels: list[tuple[int, int]] = []
        self._shape = (0, 0)  # of the padded input

    def record(
        self,
        rows: Sequence[Row],
        *,
        examples_per_row: int,
        batch_size: int,
        advance: Callable[[], Any],
    ) -> Recorded:
        """Run the detector on images and call ``advance`` after each.

        Raises:
            DataError: If no image can be read.
        """
        found = Recorded()
        left = [examples_per_row] * len(rows)
        loaded = self._loaded(rows, found.faults)
        # Images of one shape share a forward pass, whose records are read after it.
        for _, alike in groupby(loaded, lambda one: one[2]["inputs"].shape):
            while batch := list(islice(alike, batch_size)):
                self._run([packed for _, _, packed in batch])
                self._count(found, [row for row, _, _ in batch], rows)
                for image, (row, path, packed) in enumerate(batch):
                    advance()
                    left[row] -= 1
                    if left[row] >= 0:
                        example = self._example(image, rows[row].name, path, packed)
                        found.examples.append(example)
        if not found.served:
            raise DataError(f"no image can be read: {'; '.join(found.faults)}")
        return found

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

    def _run(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Run the detector, and keep its routing records and feature sizes."""
        detector = self.detector

        def keep_levels(*call: Any) -> None:
            self._levels = [tuple(map_BCHW.shape[-2:]) for map_BCHW in call[2]]

        def keep_records(*_: Any) -> None:
            self._records = dict(detector.routing.records)

        neck = getattr(detector, "neck", detector.backbone)
        with (
            neck.register_forward_hook(keep_levels),
            detector.bbox_head.register_forward_hook(keep_records),
        ):
            self._shape = detect(detector, batch)[0].batch_input_shape

    def _count(
        self, found: Recorded, numbers: Sequence[int], rows: Sequence[Row]
    ) -> None:
        """Add the routes of a batch to the rows of its images."""
        groups = [row.group for row in rows]
        for name, record in self._records.items():
            allowed_GE = record.group_experts_GE
            if allowed_GE is not None:
                allowed_GE = None if None in groups else allowed_GE[groups]
            row_B = torch.tensor(numbers, device=record.logits_VE.device)
            mine = dataclasses.replace(
                record,
                group_ids_V=record.packing.spread(row_B),
                group_experts_GE=allowed_GE,
            )
            kinds = [(found.served, False)]
            if _is_kept_to_a_group(record):
                kinds.append((found.chosen, True))
            for tallies, forced in kinds:
                one = dataclasses.replace(mine, is_forced=forced)
                tally = LayerTally.of(one, num_groups=len(rows))
                add_tallies(tallies, {name: tally})

    def _example(
        self, image: int, row: str, path: Path, packed: Mapping[str, Any]
    ) -> Example:
        """Picture and regions of one image of the batch."""
        rgb_CHW = packed["inputs"].flip(0).float().clamp(0, 255).to(torch.uint8)
        whole = Image.fromarray(rgb_CHW.permute(1, 2, 0).numpy())
        sides = [max(round(side * TILE / max(whole.size)), 1) for side in whole.size]
        picture = whole.resize((sides[0], sides[1]))
        regions, elected = {}, {}
        for name, record in self._records.items():
            is_kept = _is_kept_to_a_group(record)
            if is_kept:
                taken_E = count_tokens_BE(record)[image]
                elected[name] = taken_E.nonzero().flatten().tolist()
            if name.startswith("encoder."):
                expert_V = (
                    record.logits_VE.argmax(1) if is_kept else top1_expert(record)
                )
                expert_BN = record.packing.unpack(expert_V, fill=record.num_experts)
                regions[name] = self._maps(expert_BN[image], whole, picture)
        return Example(row, path, picture, regions, elected)

    def _maps(
        self, expert_N: Tensor, whole: Image.Image, picture: Image.Image
    ) -> list[np.ndarray]:
        """Expert maps in the size of ``picture`` per level."""
        lengths = [height * width for height, width in self._levels]
        if sum(lengths) != len(expert_N):
            return []  # the encoder's tokens differ from the neck's
        maps = []
        parts = expert_N.cpu().int().split(lengths)
        for part, (rows, columns) in zip(parts, self._levels, strict=True):
            places = Image.fromarray(part.view(rows, columns).numpy())
            height, width = self._shape  # padded
            box = (0, 0, columns * whole.width / width, rows * whole.height / height)
            nearest = Image.Resampling.NEAREST
            maps.append(np.asarray(places.resize(picture.size, nearest, box)))
        return maps


def _is_kept_to_a_group(record: RoutingRecord) -> bool:
    """Whether a vote or a given dataset restricts the choice of single tokens."""
    return record.votes_BG is not None or record.is_forced
