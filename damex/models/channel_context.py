"""ChannelContext: how the gates of a batch reach layers deep inside of mmdet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from damex.moe import ChannelGates

__all__ = ["ChannelContext"]


class ChannelContext:
    """The gates that the gated layers of one detector share during one forward pass.

    As :class:`damex.models.context.RoutingContext`, it is filled for the time of a step
    and empty outside of it.
    """

    def __init__(self) -> None:
        self._gates: ChannelGates | None = None

    @property
    def gates(self) -> ChannelGates:
        """Gates of the images of the current step.

        Raises:
            RuntimeError: If no step is open.
        """
        if self._gates is None:
            raise RuntimeError(
                "gated layers run only inside of a step of their detector, which looks "
                "at the images first: call the detector's loss, predict or forward, "
                "not its parts."
            )
        return self._gates

    @contextmanager
    def step(self, gates: ChannelGates) -> Iterator[None]:
        """Open one forward pass.

        Args:
            gates: What the gating path says about its images.
        """
        self._gates = gates
        try:
            yield
        finally:
            self._gates = None

    def snapshot(self) -> ChannelGates | None:
        """The gates of now, for a later :meth:`replay`."""
        return self._gates

    @contextmanager
    def replay(self, snapshot: ChannelGates | None) -> Iterator[None]:
        """Let layers that are computed a second time read the gates of the first.

        Args:
            snapshot: What :meth:`snapshot` gave in the first run.
        """
        present, self._gates = self._gates, snapshot
        try:
            yield
        finally:
            self._gates = present

    def layer(self, name: str) -> Tensor:
        """Gates (images, channels) of one layer."""
        return self.gates.layers[name]
