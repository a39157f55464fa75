"""Whole transformer layers recomputed in the backward pass instead of kept.

mmdet does this by ``num_cp`` with fairscale, which has to be installed, and knows
nothing of routing: when a layer runs for the second time, the step is over and its
experts would see other groups and no mask. Here the second run sees what the first
one saw, and what it records is thrown away.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from damex.errors import ConfigError

__all__ = ["checkpoint_layers", "take_num_cp"]

PARTS = ("encoder", "decoder")


class Replayable(Protocol):
    """A context that can show a layer again what it showed before."""

    def snapshot(self) -> Any:
        """All that layers may read now."""

    def replay(self, snapshot: Any) -> AbstractContextManager[None]:
        """Let layers read that again."""


class CheckpointedForward:
    """Stands as ``forward`` on a layer, whose parameters keep their names.

    Args:
        layer: A transformer layer.
        contexts: What its experts or gated channels read.
    """

    def __init__(self, layer: nn.Module, contexts: Sequence[Replayable]) -> None:
        self.layer = layer
        self.contexts = contexts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.layer).forward
        if not (self.layer.training and torch.is_grad_enabled()):
            return forward(self.layer, *args, **kwargs)
        seen = [context.snapshot() for context in self.contexts]

        def first_and_second_run() -> tuple[
            AbstractContextManager, AbstractContextManager
        ]:
            return nullcontext(), self._replay(seen)

        return checkpoint(
            forward,
            self.layer,
            *args,
            use_reentrant=False,
            context_fn=first_and_second_run,
            **kwargs,
        )

    @contextmanager
    def _replay(self, seen: Sequence[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for context, snapshot in zip(self.contexts, seen, strict=True):
                stack.enter_context(context.replay(snapshot))
            yield


def take_num_cp(
    config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, int]]:
    """Take ``num_cp`` out of a detector's encoder and decoder.

    Args:
        config: Arguments of an mmdet detector. Not changed.

    Returns:
        The arguments without it, and the number of layers to recompute for each part
        that asks for it.

    Raises:
        ConfigError: If a number is not one of layers.
    """
    config, counts = dict(config), {}
    for part in PARTS:
        value = (config.get(part) or {}).get("num_cp")
        if value is None:
            continue
        layers = config[part].get("num_layers")
        if type(value) is not int or not -1 <= value <= layers:
            raise ConfigError(
                f"model.{part}.num_cp, the number of layers to recompute, must be an "
                f"integer from 0 to {layers} (num_layers), or -1 for none, got "
                f"{value!r}."
            )
        config[part] = copy.copy(config[part])
        del config[part]["num_cp"]
        counts[part] = value
    return config, counts


def checkpoint_layers(
    detector: nn.Module,
    counts: Mapping[str, int],
    *,
    contexts: Sequence[Replayable],
) -> None:
    """Recompute the first layers of the encoder or decoder in the backward pass.

    Random numbers (dropout, the noise of gates) and autocast are those of the first
    run, so that losses and gradients are the same as without.

    Args:
        detector: A built detector, experts inserted.
        counts: Number of layers by part, ``encoder`` or ``decoder``.
        contexts: What its experts or gated channels read.
    """
    for part, count in counts.items():
        for layer in getattr(detector, part).layers[: max(count, 0)]:
            layer.forward = CheckpointedForward(layer, contexts)
