"""Initial phases of a training: router warm-up, and upcycling on the way.

Sparse upcycling (Komatsuzaki et al. 2023, arXiv 2212.05055) within one training: the
parameters are those of the experts from the start. In the dense phase one expert of
each bank acts as the FFN, and the others get zero gradients; at its end all become
copies of it, optimizer moments included (appendix B.6 of the paper).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from damex.errors import ConfigError, check_known
from damex.models.blocks import MoEFFN
from damex.models.config import UpcyclingConfig, WarmupConfig
from damex.models.insertion import EXTENSIONS
from damex.models.starts import DENSE_EXPERT, DensePhase
from damex.moe import FFNExperts, MoELayer, copy_expert_to_all


class RouterWarmup:
    """Trains only the routers at first, and everything but the routers afterwards.

    Frozen parameters need no gradient, so optimizers skip them, weight decay included.
    With several processes this needs ``find_unused_parameters=True``, set by
    :class:`damex.engine.runner.MixtureRunner`. Running statistics of batch norms
    continue to change.

    Raises:
        ConfigError: If the layers lack the configured loss, or it needs more dataset
            groups.
    """

    def __init__(self, config: WarmupConfig, layer: MoELayer) -> None:
        names = [loss.name for loss in layer.losses]
        check_known(
            config.loss,
            names,
            f"moe.router_warmup.loss is {config.loss!r}, which is not a loss in "
            "moe.losses (SeparateRouterLoss has the name 'separate_router')",
        )
        groups_GE = layer.group_experts_GE
        num_groups = 0 if groups_GE is None else len(groups_GE)
        if config.loss == "separate_router" and num_groups < 2:
            raise ConfigError(
                "moe.router_warmup separates dataset groups and needs two or more, got "
                f"{num_groups}; give the mixture another group, or set "
                "router_warmup=None."
            )
        self.config = config
        self._is_open: bool | None = None
        self._frozen: list[nn.Parameter] = []

    def begin_step(self, model: nn.Module, *, iteration: int, max_iters: int) -> None:
        """Set which parameters are trained at this iteration (from 0).

        Only the iteration counts, so a resumed run continues like an uninterrupted one.

        Raises:
            ConfigError: If the training ends before the warm-up does.
        """
        self._is_open = iteration < self.config.length(max_iters)
        layers: list[Any] = [m for m in model.modules() if isinstance(m, MoELayer)]
        routers = {id(p) for layer in layers for p in layer.router.parameters()}
        _require_grad(self._frozen, True)
        self._frozen = [
            p
            for p in model.parameters()
            if p.requires_grad and (id(p) in routers) != self._is_open
        ]
        _require_grad(self._frozen, False)
        for parameter in self._frozen:
            parameter.grad = None  # of an unfinished step

    def choose_losses(self, losses: Mapping[str, Any]) -> dict[str, Any]:
        """Detach the losses that are not minimized in this step.

        During the warm-up only its loss keeps a gradient. Afterwards it is renamed
        without ``loss``, so that it is logged but not added to the total.

        Raises:
            RuntimeError: If :meth:`begin_step` was never called.
        """
        if self._is_open is None:
            raise _without_iteration("router_warmup")
        key = f"loss_moe_{self.config.loss}"
        if self._is_open:
            return {
                name: value if name == key else _detached(value)
                for name, value in losses.items()
            }
        rest = {name: value for name, value in losses.items() if name != key}
        return {**rest, f"moe_{self.config.loss}": _detached(losses[key])}


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
        self._has_begun = False

    def check_begun(self) -> None:
        """Raise RuntimeError in a dense phase that nothing would end."""
        if self.is_dense and not self._has_begun:
            raise _without_iteration("upcycling")

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
        start, self._has_begun = self.config.length(max_iters), True
        for block in self.blocks:
            if iteration >= start and block.is_dense:
                bank = cast(nn.Module, block.moe.experts)
                copy_expert_to_all(bank, expert=DENSE_EXPERT, optimizer=optimizer)
                cast(DensePhase, block.dense_phase).close()
        # The parts of open blocks that are not computed.
        _require_grad(self._frozen, True)
        self._frozen = [
            parameter
            for block in self.blocks
            if block.is_dense
            for name, parameter in block.moe.named_parameters()
            if parameter.requires_grad and not name.startswith("experts.")
        ]
        _require_grad(self._frozen, False)
        return start


def _without_iteration(option: str) -> RuntimeError:
    return RuntimeError(
        f"moe.{option} needs the iteration of the training, which was not set: train "
        "with damex's runner, add dict(type='TrainingStepHook') to custom_hooks, or "
        f"set {option}=None."
    )


def _require_grad(parameters: Sequence[nn.Parameter], is_required: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(is_required)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return [item.detach() for item in value]


EXTENSIONS["router_warmup"] = RouterWarmup
EXTENSIONS["upcycling"] = InRunUpcycling
