"""RoutingContext: how dataset ids and packings reach MoE layers inside mmdet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from damex.models.queries import GroundTruth
from damex.moe import ChannelGates, Packing, RoutingRecord


class RoutingContext:
    """What the MoE layers and gated layers of a detector share in a forward pass.

    mmdet calls ``self.ffn(query)`` and hands over nothing else. So the detector opens
    a :meth:`step`, in it the encoder and the decoder each open a :meth:`component`, and
    the layers read the group ids and the packing here and leave their records here.
    Outside of a step the context is empty: nothing is left over for the next one.

    Shapes: B images, N tokens per image.

    Attributes:
        group_ids_B: Dataset group of every image, -1 where unknown; None at inference
            (but for ``moe.oracle``).
        ground_truth: Boxes of the batch; None unless a loss asks for the foreground.
        valid_ratio_B2: (height, width) of each image as a share of the padded input;
            None where no image is padded.
        gates: Channel gates of the images; None where no channels are gated.
        packing: Which tokens are real, made once for all layers; None where all are.
        foreground_BN: True for tokens on an object; None where no loss asks for it.
        num_auxiliary: How many tokens follow these in each image for an auxiliary loss.
            They pass the experts, and are neither counted nor taught where to go.
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
            RuntimeError: If a step is open already.
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
        """Say which tokens the encoder or the decoder has; see the attributes.

        Args:
            token_mask_BN: True for real tokens; None where all are real.
            foreground_BN: See the attributes.
            num_auxiliary: See the attributes.
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
        """All that layers may read now, for a later :meth:`replay`."""
        return {**vars(self), "records": {}}

    @contextmanager
    def replay(self, snapshot: dict[str, Any]) -> Iterator[None]:
        """Let layers that are computed a second time read what they read at first.

        Their records are not kept: those of the first time are in the losses already.

        Args:
            snapshot: What :meth:`snapshot` gave in the first run.
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
        """Votes for the group of each image so far; None where nobody voted yet."""
        votes = [r.votes_BG for r in self.records.values() if r.votes_BG is not None]
        return votes[-1] if votes else None

    def add(self, name: str, record: RoutingRecord) -> None:
        """Keep the record of a layer for the rest of the step.

        A layer that runs outside of a step (a plain ``forward`` call, an export) has
        nobody to read its record, which is then not kept.
        """
        if self.is_open:
            self.records[name] = record

    def layer_gates(self, name: str) -> Tensor:
        """Gates (images, channels) of one gated layer.

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
