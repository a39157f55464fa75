"""Whole transformer layers recomputed in the backward pass instead of kept.

mmdet does this by ``num_cp`` with fairscale, which has to be installed, and knows
nothing of routing: when a layer runs for the second time, the step is over and its
experts would see other groups and no mask. Here the second run sees what the first
one saw, and what it records is thrown away.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from damex.errors import ConfigError
from damex.models.context import RoutingContext
from damex.models.sites import COMPONENTS


class CheckpointedForward:
    """Stands as ``forward`` on a layer, whose parameters keep their names.

    Args:
        layer: A transformer layer.
        context: What its experts or gated channels read.
    """

    def __init__(self, layer: nn.Module, context: RoutingContext) -> None:
        self.layer = layer
        self.context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer, in training for a second time in the backward pass."""
        forward = type(self.layer).forward
        if not (self.layer.training and torch.is_grad_enabled()):
            return forward(self.layer, *args, **kwargs)
        seen = self.context.snapshot()

        def first_and_second_run() -> tuple[
            AbstractContextManager, AbstractContextManager
        ]:
            return nullcontext(), self.context.replay(seen)

        return checkpoint(
            forward,
            self.layer,
            *args,
            use_reentrant=False,
            context_fn=first_and_second_run,
            **kwargs,
        )


def take_num_cp(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Take ``num_cp`` out of a detector's encoder and decoder.

    Args:
        config: Arguments of an mmdet detector. Not changed.

    Returns:
        The arguments without it, and the number of layers to recompute for each
        component that asks for it.

    Raises:
        ConfigError: If a number is not one of layers.
    """
    config, counts = dict(config), {}
    for component in COMPONENTS:
        value = (config.get(component) or {}).get("num_cp")
        if value is None:
            continue
        layers = config[component].get("num_layers")
        if type(value) is not int or not -1 <= value <= layers:
            raise ConfigError(
                f"model.{component}.num_cp, the number of layers to recompute, must be "
                f"an integer from 0 to {layers} (num_layers), or -1 for none, got "
                f"{value!r}."
            )
        config[component] = copy.copy(config[component])
        del config[component]["num_cp"]
        counts[component] = value
    return config, counts


def checkpoint_layers(
    detector: nn.Module, counts: Mapping[str, int], *, context: RoutingContext
) -> None:
    """Recompute the first layers of the encoder or decoder in the backward pass.

    Random numbers (dropout, the noise of gates) and autocast are those of the first
    run, so that losses and gradients are the same as without.

    Args:
        detector: A built detector, experts inserted.
        counts: Number of layers by component, ``encoder`` or ``decoder``.
        context: What its experts or gated channels read.
    """
    for component, count in counts.items():
        for layer in getattr(detector, component).layers[: max(count, 0)]:
            layer.forward = CheckpointedForward(layer, context)
