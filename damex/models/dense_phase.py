"""Sparse upcycling inside one training: an FFN that becomes experts on the way.

Komatsuzaki et al. 2023, arXiv 2212.05055. The parameters are those of the experts from
the start. In the dense phase one expert of each bank is the FFN, and the others get
zero gradients; at its end all experts become copies of that one, moments of the
optimiser included (appendix B.6 of the paper).
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

DENSE_EXPERT = 0  # the one that stands for the FFN
FLAG = "dense_phase.flag"  # in the state dict of a block


class DensePhase(nn.Module):
    """Whether a block is a dense FFN still.

    A checkpoint has to say it, or nobody could tell what to predict with: it is a
    buffer.

    Attributes:
        is_open: The same on the host, as reading a buffer would stall a GPU.
    """

    flag: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(True))
        self.is_open = True

    def close(self) -> None:
        """End it; it never opens again."""
        self.flag.fill_(False)
        self.is_open = False

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.is_open = bool(self.flag)


class InRunUpcycling:
    """Ends the dense phase of a detector's blocks at an iteration of the training.

    While it lasts, routers need no gradient: they keep their first weights, and no
    optimiser has state for them. With several processes that takes
    ``find_unused_parameters=True``, which
    :class:`damex.engine.runner.MixtureRunner` sets.

    Args:
        config: How long it lasts.
        blocks: Each with a dense phase.

    Raises:
        ConfigError: If the experts are no FFNs.
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
        """Whether the detector is dense still."""
        return any(block.is_dense for block in self.blocks)

    def begin_step(
        self, *, iteration: int, max_iters: int, optimizer: Optimizer | None
    ) -> int:
        """Make experts of the FFNs if this is the time.

        The blocks know whether that is done, and it is in their checkpoints. So it is
        done once, whether or not the training is cut, and experts that are loaded stay
        experts.

        Args:
            iteration: From 0.
            max_iters: Iterations of the whole training.
            optimizer: That of the training; None for a detector that is not trained.

        Returns:
            The first iteration with experts.

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
        """Let only those parts of open blocks learn that are computed."""
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
