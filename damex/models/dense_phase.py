"""Sparse upcycling within one training: FFNs that become experts on the way.

Komatsuzaki et al. 2023, arXiv 2212.05055. The parameters are those of the experts from
the start. In the dense phase one expert of each bank acts as the FFN, and the others
get zero gradients; at its end all become copies of it, optimizer moments included
(appendix B.6 of the paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from damex.errors import ConfigError
from damex.models.phases import UpcyclingConfig
from damex.moe import FFNExperts, copy_expert_to_all

if TYPE_CHECKING:
    from damex.models.blocks import MoEFFN

DENSE_EXPERT = 0  # acts as the FFN
FLAG = "dense_phase.flag"  # in the state dict of a block


class DensePhase(nn.Module):
    """Whether a block is still a dense FFN; a buffer, as checkpoints must store it.

    Attributes:
        is_open: The flag on the host, as reading the buffer would synchronize a GPU.
    """

    flag: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(True))
        self.is_open = True

    def close(self) -> None:
        """End the dense phase for good."""
        self.flag.fill_(False)
        self.is_open = False

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.is_open = bool(self.flag)


class InRunUpcycling:
    """Ends the dense phase of a detector's blocks at an iteration of the training.

    Until then routers need no gradient: they keep their initial weights, without
    optimizer state. With several processes this needs ``find_unused_parameters=True``,
    set by :class:`damex.engine.runner.MixtureRunner`.

    Raises:
        ConfigError: If the experts are not FFNs.
    """

    def __init__(self, config: UpcyclingConfig, blocks: Sequence[MoEFFN]) -> None:
        kind = type(blocks[0].moe.experts)
        if not issubclass(kind, FFNExperts):
            raise ConfigError(
                "moe.upcycling needs experts that can be copies of an FFN, of type "
                f"'FFNExperts', got {kind.__name__!r}; leave it out."
            )
        self.config = config
        self.blocks = tuple(blocks)
        self._frozen: list[nn.Parameter] = []

    @property
    def is_dense(self) -> bool:
        """Whether the detector is still dense."""
        return any(block.is_dense for block in self.blocks)

    def begin_step(
        self, *, iteration: int, max_iters: int, optimizer: Optimizer | None
    ) -> int:
        """Turn the FFNs into experts once the dense phase is over; return its length.

        The blocks store whether this is done, in checkpoints, too: it happens once even
        if the training is interrupted, and loaded experts stay experts.

        Raises:
            ConfigError: If the training ends before the dense phase does.
        """
        start = self.config.length(max_iters)
        for block in self.blocks:
            if iteration >= start and block.is_dense:
                bank = cast(nn.Module, block.moe.experts)
                copy_expert_to_all(bank, expert=DENSE_EXPERT, optimizer=optimizer)
                cast(DensePhase, block.dense_phase).close()
        self._freeze_routers()
        return start

    def _freeze_routers(self) -> None:
        """Freeze the parts of open blocks that are not computed."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = [
            parameter
            for block in self.blocks
            if block.is_dense
            for name, parameter in block.moe.named_parameters()
            if parameter.requires_grad and not name.startswith("experts.")
        ]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
