"""Router warm-up: which parameters a training step trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from damex.errors import ConfigError, did_you_mean
from damex.models.phases import WarmupConfig
from damex.moe import MoELayer, SeparateRouterLoss


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

    def __init__(self, config: WarmupConfig, layers: Sequence[MoELayer]) -> None:
        names = [loss.name for loss in layers[0].losses]
        if config.loss not in names:
            raise ConfigError(
                f"moe.router_warmup.loss is {config.loss!r}, which is no loss in "
                "moe.losses (SeparateRouterLoss has the name 'separate_router'); "
                f"{did_you_mean(config.loss, names)}"
            )
        groups_GE = layers[0].group_experts_GE
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
        routers = {id(p) for p in _router_parameters(model)}
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = [
            p
            for p in model.parameters()
            if p.requires_grad and (id(p) in routers) != self._is_open
        ]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
            parameter.grad = None  # of an unfinished step

    def choose_losses(self, losses: Mapping[str, Any]) -> dict[str, Any]:
        """Detach the losses that are not minimized in this step.

        During the warm-up only its loss keeps a gradient. Afterwards it is renamed
        without ``loss``, so that it is logged but not added to the total.

        Raises:
            RuntimeError: If :meth:`begin_step` was never called.
        """
        if self._is_open is None:
            raise RuntimeError(
                "moe.router_warmup needs the iteration of the training, and nobody "
                "tells it: train with damex's runner, add "
                "dict(type='TrainingStepHook') to custom_hooks, or set "
                "router_warmup=None."
            )
        key = f"loss_moe_{self.config.loss}"
        if self._is_open:
            return {
                name: value if name == key else _detached(value)
                for name, value in losses.items()
            }
        rest = {name: value for name, value in losses.items() if name != key}
        return {**rest, f"moe_{self.config.loss}": _detached(losses[key])}


def check_losses(layers: Sequence[MoELayer]) -> None:
    """Raise ConfigError if a loss needs a warm-up, for detectors without one."""
    if any(isinstance(loss, SeparateRouterLoss) for loss in layers[0].losses):
        raise ConfigError(
            "moe.losses: SeparateRouterLoss has no minimum and is for a warm-up in "
            "which routers are trained alone; set moe.router_warmup=dict(share=0.1), "
            "or remove it."
        )


def _router_parameters(model: nn.Module) -> list[nn.Parameter]:
    layers = [m for m in model.modules() if isinstance(m, MoELayer)]
    routers = [m.router for m in layers if isinstance(m.router, nn.Module)]
    return [p for router in routers for p in router.parameters()]


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return [item.detach() for item in value]
