"""Activation checkpointing of whole transformer layers.

mmdet's ``num_cp`` needs fairscale and does not know about routing: when it recomputes a
layer, the step is closed and its experts would see no groups and no mask. Here the
second run reads what the first run read, and its records are discarded.
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
    """The ``forward`` of a layer, with checkpointing; parameters keep their names."""

    def __init__(self, layer: nn.Module, context: RoutingContext) -> None:
        self.layer = layer
        self.context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; in training it is recomputed in the backward pass."""
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
    """Split ``num_cp`` of encoder and decoder from a copy of a detector's arguments.

    Raises:
        ConfigError: If a value is not a valid number of layers.
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
    """Recompute the first ``counts[component]`` layers in the backward pass.

    Dropout, gate noise and autocast are replayed, so losses and gradients do not
    change. The experts must be inserted before.
    """
    for component, count in counts.items():
        for layer in getattr(detector, component).layers[: max(count, 0)]:
            layer.forward = CheckpointedForward(layer, context)
