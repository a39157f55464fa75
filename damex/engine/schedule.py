"""What gates are told at the start and the end of a training step's forward.

That a new step begins, which balancing waits for, how far the training is, and that
all load of the step is known.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.runner import Runner
from torch import Tensor, nn

from damex.datasets.mixture import mix_seed
from damex.errors import ConfigError, did_you_mean
from damex.models.blocks import MoEFFN, MoEPatchConv
from damex.moe import MoELayer, SeparateRouterLoss

__all__ = [
    "IterationSeedHook",
    "RouterStage",
    "StagedTraining",
    "gather_loads",
    "prepare_gates",
    "read_router_stage",
    "training_iteration",
    "training_progress",
]


def training_iteration() -> tuple[int, int] | None:
    """Number of the iteration and of all, from mmengine's message hub.

    Returns:
        The first iteration has number 0; None where no runner trains.
    """
    hub = MessageHub.get_current_instance()
    now, end = hub.get_info("iter"), hub.get_info("max_iters")
    return None if now is None or end is None else (now, end)


def training_progress() -> float | None:
    """Share of the training that is done.

    Returns:
        0 in the first iteration and 1 in the last; None where no runner trains.
    """
    iteration = training_iteration()
    if iteration is None:
        return None
    now, end = iteration
    return min(now / max(end - 1, 1), 1.0)


def prepare_gates(
    blocks: Iterable[MoEFFN | MoEPatchConv], progress: float | None
) -> None:
    """Tell gates that a step begins.

    A step is one forward in training: with gradient accumulation every micro-batch
    counts as one.

    Args:
        blocks: The MoE blocks of a detector.
        progress: Share of the training that is done, in [0, 1]; None where no runner
            tells it.
    """
    for block in blocks:
        block.moe.gate.begin_step(progress)


def gather_loads(blocks: Iterable[MoEFFN | MoEPatchConv]) -> None:
    """Let gates sum the load of the forward over all processes.

    A checkpoint may be written before the next step, and one process writes it for all.

    Args:
        blocks: The MoE blocks of a detector.
    """
    for block in blocks:
        block.moe.gate.end_step()


FIELDS = ("share", "iters", "loss")


@dataclass(frozen=True)
class RouterStage:
    """When the stage ends, and what is minimised until then.

    Attributes:
        share: Length as a share of all iterations, in (0, 1), rounded up.
        iters: Length in iterations. One of the two is set.
        loss: Name of the routing loss that the stage minimises.
    """

    share: float | None
    iters: int | None
    loss: str

    def is_open(self) -> bool:
        """Whether the runner's iteration belongs to the stage.

        Nothing but the number of the iteration counts, so a run that is resumed goes
        on in the right stage.

        Raises:
            RuntimeError: If no runner tells its iteration.
            ConfigError: If the training ends before the stage does. The length of a
                training by epochs is known only when it runs.
        """
        now = training_iteration()
        if now is None:
            raise RuntimeError(
                "moe.router_stage needs the iteration of a mmengine runner, and none "
                "trains; train with tools/train.py, or set router_stage=None."
            )
        iteration, max_iters = now
        if self.iters is not None:
            if self.iters >= max_iters:
                raise ConfigError(
                    f"moe.router_stage.iters is {self.iters}, but the training has "
                    f"{max_iters} iterations, so nothing but the routers would ever "
                    "learn; set fewer iters, or share=0.1 in their place."
                )
            return iteration < self.iters
        return iteration < math.ceil((self.share or 0.0) * max_iters)


class StagedTraining:
    """Keeps all but the routers still during the stage, and the routers after it.

    Still parameters need no gradient, so optimisers pass them by, weight decay
    included. With several processes that takes ``find_unused_parameters=True``, which
    :class:`damex.engine.runner.MixtureRunner` sets. Running statistics of batch norms
    are no parameters and go on.

    Args:
        stage: When and what.
    """

    def __init__(self, stage: RouterStage) -> None:
        self.stage = stage
        self._still: list[nn.Parameter] = []

    def begin_step(self, model: nn.Module) -> bool:
        """Set what is trained in this step.

        Args:
            model: With MoE layers.

        Returns:
            Whether the stage is open.
        """
        is_open = self.stage.is_open()
        routers = _router_parameters(model)
        self._release()
        if is_open:
            ids = {id(p) for p in routers}
            self._keep_still(p for p in model.parameters() if id(p) not in ids)
        else:
            self._keep_still(routers)
        return is_open

    def choose_losses(
        self, losses: Mapping[str, Any], *, is_open: bool
    ) -> dict[str, Any]:
        """Leave gradients to the losses of the step's stage.

        Args:
            losses: All losses of a training step.
            is_open: Whether the stage is open.

        Returns:
            The same; during the stage only its loss has a gradient, and afterwards its
            loss is a number without ``loss`` in its name, which is logged and not added
            to the total.
        """
        key = f"loss_moe_{self.stage.loss}"
        if is_open:
            return {
                name: value if name == key else _detached(value)
                for name, value in losses.items()
            }
        rest = {name: value for name, value in losses.items() if name != key}
        return {**rest, f"moe_{self.stage.loss}": _detached(losses[key])}

    def _keep_still(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                parameter.grad = None  # of a step that is not finished
                self._still.append(parameter)

    def _release(self) -> None:
        for parameter in self._still:
            parameter.requires_grad_(True)
        self._still.clear()


def read_router_stage(config: Any, layers: Sequence[MoELayer]) -> RouterStage | None:
    """Check ``moe.router_stage`` against the losses of the built layers.

    Args:
        config: ``dict(share=0.1)`` or ``dict(iters=500)``, and ``loss='...'``, the name
            of a loss in ``moe.losses``; 'separate_router' by default. None for none.
        layers: The MoE layers, all with the same losses.

    Raises:
        ConfigError: If a field cannot work, or a loss needs a stage that is not set.
    """
    losses = layers[0].losses
    if config is None:
        for loss in losses:
            if isinstance(loss, SeparateRouterLoss):
                raise ConfigError(
                    "moe.losses: SeparateRouterLoss has no minimum and is for a stage "
                    "in which routers are trained alone; set "
                    "moe.router_stage=dict(share=0.1), or remove it."
                )
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"moe.router_stage must be dict(share=0.1) or dict(iters=500), got "
            f"{config!r}."
        )
    for key in config:
        if key not in FIELDS:
            raise ConfigError(
                f"moe.router_stage has the unknown key {key!r}; "
                f"{did_you_mean(key, FIELDS)}"
            )
    share, iters = config.get("share"), config.get("iters")
    _check_length(share, iters)
    name = config.get("loss", "separate_router")
    names = [loss.name for loss in losses]
    if name not in names:
        raise ConfigError(
            f"moe.router_stage.loss is {name!r}, which is no loss in moe.losses "
            f"(SeparateRouterLoss has the name 'separate_router'); "
            f"{did_you_mean(str(name), names)}"
        )
    groups_GE = layers[0].group_experts_GE
    if name == "separate_router" and (groups_GE is None or len(groups_GE) < 2):
        raise ConfigError(
            "moe.router_stage parts dataset groups and needs two or more, got "
            f"{0 if groups_GE is None else len(groups_GE)}; give the mixture another "
            "group, or set router_stage=None."
        )
    return RouterStage(share=share, iters=iters, loss=name)


def _check_length(share: Any, iters: Any) -> None:
    if (share is None) == (iters is None):
        raise ConfigError(
            "moe.router_stage: set one of share and iters, got "
            f"share={share!r} and iters={iters!r}."
        )
    if iters is not None and (type(iters) is not int or iters < 1):
        raise ConfigError(
            f"moe.router_stage.iters must be an integer of 1 or more, got {iters!r}."
        )
    if share is not None and not (isinstance(share, float) and 0.0 < share < 1.0):
        raise ConfigError(
            "moe.router_stage.share must be a number between 0 and 1, both left out, "
            f"got {share!r}."
        )


def _router_parameters(model: nn.Module) -> list[nn.Parameter]:
    layers = [m for m in model.modules() if isinstance(m, MoELayer)]
    routers = [m.router for m in layers if isinstance(m.router, nn.Module)]
    return [p for router in routers for p in router.parameters()]


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return [item.detach() for item in value]


@HOOKS.register_module()
class IterationSeedHook(Hook):
    """Seed all generators before every training iteration.

    Denoising queries, gate noise and dropout then depend on (seed, process,
    iteration) alone. A run that was killed and resumed from its last checkpoint ends
    with the same weights as one that was not, on every process, without storing any
    generator state. Data augmentation gets its seeds from ``MixtureSampler``.
    """

    priority = "VERY_HIGH"

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Seed random, numpy and torch (CPU and GPU)."""
        seed = mix_seed(runner.seed or 0, runner.rank, runner.iter)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
