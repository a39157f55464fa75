"""RoutingContext: passes dataset ids and packings to MoE layers inside mmdet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from damex.models.queries import GroundTruth
from damex.moe import ChannelGates, Packing, RoutingRecord


class RoutingContext:
    """State that a detector's MoE and gated layers share in a forward pass.

    mmdet calls ``self.ffn(query)`` without further arguments. So the detector opens a
    :meth:`step`, in it encoder and decoder each open a :meth:`component`, and layers
    read group ids and packing from here and add their records. Outside of a step the
    context is empty.

    Attributes:
        group_ids_B: Dataset group of each image, -1 where unknown; None at inference
            (except with ``moe.oracle``).
        ground_truth: Boxes of the batch; None unless a loss needs the foreground.
        valid_ratio_B2: (height, width) of each image as a share of the padded input;
            None if no image is padded.
        packing: Which tokens are real, shared by all layers; None if all are.
        foreground_BN: True for tokens on an object; None if no loss needs it.
        num_auxiliary: Number of tokens at the end of each image for an auxiliary loss.
            They pass the experts, but are neither counted nor used in routing losses.
        records: Records of the step by layer name, in the order of computation.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.is_open = False
        self.group_ids_B: Tensor | None = None
        self.ground_truth: GroundTruth | None = None
        self.valid_ratio_B2: Tensor | None = None
        self.gates: ChannelGates | None = None
        self.packing: Packing | None = None
        self.foreground_BN: Tensor | None = None
        self.num_auxiliary = 0
        self.records: dict[str, RoutingRecord] = {}

    @contextmanager
    def step(
        self,
        group_ids_B: Tensor | None = None,
        *,
        ground_truth: GroundTruth | None = None,
        valid_ratio_B2: Tensor | None = None,
        gates: ChannelGates | None = None,
    ) -> Iterator[None]:
        """Open one forward pass; the arguments are the attributes.

        Raises:
            RuntimeError: If a step is already open.
        """
        if self.is_open:
            raise RuntimeError("a routing step is open already; steps do not nest.")
        self.is_open, self.group_ids_B = True, group_ids_B
        self.ground_truth, self.valid_ratio_B2 = ground_truth, valid_ratio_B2
        self.gates = gates
        try:
            yield
        finally:
            self._clear()

    @contextmanager
    def component(
        self,
        token_mask_BN: Tensor | None,
        foreground_BN: Tensor | None = None,
        *,
        num_auxiliary: int = 0,
    ) -> Iterator[None]:
        """Set the tokens of the encoder or decoder; see the attributes.

        ``token_mask_BN`` is True for real tokens; None means that all are real.
        """
        if token_mask_BN is not None:
            self.packing = Packing.of_mask(token_mask_BN)
        self.foreground_BN = foreground_BN
        self.num_auxiliary = num_auxiliary
        try:
            yield
        finally:
            self.packing, self.foreground_BN = None, None
            self.num_auxiliary = 0

    def snapshot(self) -> dict[str, Any]:
        """Return the state that layers may read now, for a later :meth:`replay`."""
        return {**vars(self), "records": {}}

    @contextmanager
    def replay(self, snapshot: dict[str, Any]) -> Iterator[None]:
        """Restore a snapshot while a layer is recomputed.

        Records are discarded: those of the first run are already in the losses.
        """
        present = dict(vars(self))
        vars(self).update(snapshot, records={})
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(present)

    @property
    def votes_BG(self) -> Tensor | None:
        """Group votes of each image so far; None before the first vote."""
        votes = [r.votes_BG for r in self.records.values() if r.votes_BG is not None]
        return votes[-1] if votes else None

    def add(self, name: str, record: RoutingRecord) -> None:
        """Keep a layer's record for the rest of the step; ignored outside of a step."""
        if self.is_open:
            self.records[name] = record

    def layer_gates(self, name: str) -> Tensor:
        """Return the gates (images, channels) of one gated layer.

        Raises:
            RuntimeError: If no step is open.
        """
        if self.gates is None:
            raise RuntimeError(
                "gated layers run only inside of a step of their detector, which looks "
                "at the images first: call the detector's loss, predict or forward, "
                "not its parts."
            )
        return self.gates.layers[name]
