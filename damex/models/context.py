"""RoutingContext: how dataset ids and packings reach MoE layers inside mmdet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from damex.models.queries import GroundTruth
from damex.moe import Packing, RoutingRecord

__all__ = ["RoutingContext"]


class RoutingContext:
    """What the MoE layers of one detector share during one forward pass.

    mmdet calls ``self.ffn(query)`` and hands over nothing else. So the detector opens
    a :meth:`step`, in it a :meth:`part` per transformer half, and the layers read the
    group ids and the packing here and leave their records here. Outside of a step
    the context is empty: nothing is left over for the next one.

    Shapes: B images, N tokens per image.
    """

    def __init__(self) -> None:
        self._group_ids_B: Tensor | None = None
        self._ground_truth: GroundTruth | None = None
        self._image_share_B2: Tensor | None = None
        self._packing: Packing | None = None
        self._foreground_BN: Tensor | None = None
        self._records: dict[str, RoutingRecord] = {}
        self._open = False

    @property
    def group_ids_B(self) -> Tensor | None:
        """Dataset group of every image, -1 where unknown; None at inference."""
        return self._group_ids_B

    @property
    def image_share_B2(self) -> Tensor | None:
        """Part of the padded input's (height, width) that is image; None for all."""
        return self._image_share_B2

    @property
    def packing(self) -> Packing | None:
        """Which tokens are real, made once for all layers; None where all are."""
        return self._packing

    @property
    def foreground_BN(self) -> Tensor | None:
        """True for tokens on an object; None where no loss asks for it."""
        return self._foreground_BN

    @property
    def ground_truth(self) -> GroundTruth | None:
        """Boxes of the batch, of which the foreground follows; None as that is."""
        return self._ground_truth

    @property
    def records(self) -> dict[str, RoutingRecord]:
        """Records of the current step by layer name, in the order of computation."""
        return self._records

    @contextmanager
    def step(
        self,
        group_ids_B: Tensor | None = None,
        *,
        ground_truth: GroundTruth | None = None,
        image_share_B2: Tensor | None = None,
    ) -> Iterator[RoutingContext]:
        """Open one forward pass.

        Args:
            group_ids_B: Dataset group of every image; None at inference.
            ground_truth: Boxes of the batch; None unless a loss counts foreground.
            image_share_B2: Part of the padded input's (height, width) that is image.

        Raises:
            RuntimeError: If a step is open already.
        """
        if self._open:
            raise RuntimeError("a routing step is open already; steps do not nest.")
        self._open, self._group_ids_B, self._records = True, group_ids_B, {}
        self._ground_truth = ground_truth
        self._image_share_B2 = image_share_B2
        try:
            yield self
        finally:
            self._open, self._group_ids_B, self._records = False, None, {}
            self._packing = self._foreground_BN = None
            self._ground_truth = self._image_share_B2 = None

    @contextmanager
    def part(
        self, token_mask_BN: Tensor | None, foreground_BN: Tensor | None = None
    ) -> Iterator[None]:
        """Set the token mask and the foreground for the encoder or the decoder."""
        if token_mask_BN is not None:
            self._packing = Packing.of_mask(token_mask_BN)
        self._foreground_BN = foreground_BN
        try:
            yield
        finally:
            self._packing = self._foreground_BN = None

    def snapshot(self) -> dict[str, Any]:
        """All that layers may read now, for a later :meth:`replay`."""
        return {**vars(self), "_records": {}}

    @contextmanager
    def replay(self, snapshot: dict[str, Any]) -> Iterator[None]:
        """Let layers that are computed a second time read what they read at first.

        Their records are not kept: those of the first time are in the losses already.

        Args:
            snapshot: What :meth:`snapshot` gave in the first run.
        """
        present = dict(vars(self))
        vars(self).update(snapshot, _records={})
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(present)

    def add(self, name: str, record: RoutingRecord) -> None:
        """Keep the record of a layer for the rest of the step.

        A layer that runs outside of a step (a plain ``forward`` call, an export) has
        nobody to read its record, which is then not kept.
        """
        if self._open:
            self._records[name] = record
