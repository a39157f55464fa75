"""Initial phases of a training, in the ``moe=`` tree of a detector's config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from damex.errors import ConfigError
from damex.models.rules import COUNT, SHARE, TEXT


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """An initial phase of the training; exactly one of the two lengths is set.

    Attributes:
        share: Length as a share of all iterations, in (0, 1), rounded up.
        iters: Length in iterations.
    """

    share: Annotated[float | None, SHARE] = None
    iters: Annotated[int | None, COUNT] = None

    where = "moe"
    missed = "nothing else would happen"

    def __post_init__(self) -> None:
        if (self.share is None) == (self.iters is None):
            raise ConfigError(
                f"{self.where}: set one of share and iters, got "
                f"share={self.share!r} and iters={self.iters!r}."
            )

    def length(self, max_iters: int) -> int:
        """Return the length in iterations of a training of ``max_iters``.

        Raises:
            ConfigError: If the training ends before the phase. Checked at run time,
                when the length of an epoch-based training is known.
        """
        if self.iters is None:
            return math.ceil((self.share or 0.0) * max_iters)
        if self.iters >= max_iters:
            raise ConfigError(
                f"{self.where}.iters is {self.iters}, but the training has {max_iters} "
                f"iterations, so {self.missed}; set fewer iters, or share=0.1 in their "
                "place."
            )
        return self.iters


@dataclass(frozen=True, kw_only=True)
class WarmupConfig(PhaseConfig):
    """The field ``moe.router_warmup``: train the routers alone first, on ``loss``."""

    loss: Annotated[str, TEXT] = "separate_router"

    where = "moe.router_warmup"
    missed = "nothing but the routers would ever learn"


@dataclass(frozen=True, kw_only=True)
class UpcyclingConfig(PhaseConfig):
    """The field ``moe.upcycling``; see :mod:`damex.models.dense_phase`."""

    where = "moe.upcycling"
    missed = "the detector would never have experts"
