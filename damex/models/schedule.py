"""The warm-up of routers: which parameters a training step trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from damex.errors import ConfigError, did_you_mean
from damex.models.phases import WarmupConfig
from damex.moe import MoELayer, SeparateRouterLoss


class RouterWarmup:
    """Trains nothing but the routers at first, and all but the routers afterwards.

    Parameters that are not trained need no gradient, so optimisers pass them by, weight
    decay included. With several processes that takes ``find_unused_parameters=True``,
    which :class:`damex.engine.runner.MixtureRunner` sets. Running statistics of batch
    norms are no parameters and go on.

    Args:
        config: How long, and on which loss.
        layers: The MoE layers of a detector, all with the same losses.

    Raises:
        ConfigError: If the layers do not have that loss, or it has nothing to do.
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
        """Set what is trained in this step.

        Nothing but the number of the iteration counts, so a run that is resumed goes
        on as one that was not cut.

        Args:
            model: With MoE layers.
            iteration: From 0.
            max_iters: Iterations of the whole training.

        Raises:
            ConfigError: If the training ends before the warm-up does. The length of a
                training by epochs is known only when it runs.
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
            parameter.grad = None  # of a step that is not finished

    def choose_losses(self, losses: Mapping[str, Any]) -> dict[str, Any]:
        """Leave gradients to the losses that are minimised in this step.

        Args:
            losses: All losses of a training step.

        Returns:
            The same; during the warm-up only its loss has a gradient, and afterwards
            its loss is a number without ``loss`` in its name, which is logged and not
            added to the total.

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
    """Refuse a loss that needs a warm-up, for detectors without.

    Args:
        layers: The MoE layers of a detector, all with the same losses.

    Raises:
        ConfigError: If there is one.
    """
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
