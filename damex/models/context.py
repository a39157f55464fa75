"""State that MoE layers read during a forward pass, and again when recomputed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from damex.errors import ConfigError
from damex.moe import Packing, RoutingRecord


class RoutingContext:
    """State that a detector's MoE and gated layers share in a forward pass.

    mmdet calls ``self.ffn(query)`` without further arguments. So the detector opens a
    :meth:`step`, in it encoder and decoder each open a :meth:`component`, and layers
    read group ids and packing from here and add their records. Outside of a step the
    context is empty.

    Attributes:
        group_ids_B: Dataset group of each image, -1 where unknown; None at inference
            (except with ``moe.oracle``).
        boxes: Those of each image, x1 y1 x2 y2 relative to its size; None unless a loss
            needs the foreground.
        valid_ratio_B2: (height, width) of each image as a share of the padded input;
            None if no image is padded.
        gates: Gates of all layers, if channels are gated (see `damex.papers.channels`).
        packing: Which tokens are real, shared by all layers; None if all are.
        foreground_BN: True for tokens on an object; None if no loss needs it.
        num_auxiliary: Number of tokens at the end of each image for an auxiliary loss.
            They pass the experts, but are neither counted nor used in routing losses.
        records: Records of the step by layer name, in the order of computation.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.is_open = False
        self.group_ids_B: Tensor | None = None
        self.boxes: Sequence[Tensor] | None = None
        self.valid_ratio_B2: Tensor | None = None
        self.gates: Any = None
        self.packing: Packing | None = None
        self.foreground_BN: Tensor | None = None
        self.num_auxiliary = 0
        self.records: dict[str, RoutingRecord] = {}

    @contextmanager
    def step(
        self,
        group_ids_B: Tensor | None = None,
        *,
        boxes: Sequence[Tensor] | None = None,
        valid_ratio_B2: Tensor | None = None,
        gates: Any = None,
    ) -> Iterator[None]:
        """Open one forward pass; the arguments are the attributes.

        Raises:
            RuntimeError: If a step is already open.
        """
        if self.is_open:
            raise RuntimeError("a routing step is open already; steps do not nest.")
        self.is_open, self.group_ids_B = True, group_ids_B
        self.boxes, self.valid_ratio_B2 = boxes, valid_ratio_B2
        self.gates = gates
        try:
            yield
        finally:
            self._clear()

    @contextmanager
    def component(
        self,
        token_mask_BN: Tensor | None,
        foreground_BN: Tensor | None = None,
        *,
        num_auxiliary: int = 0,
    ) -> Iterator[None]:
        """Set the tokens of the encoder or decoder; see the attributes.

        ``token_mask_BN`` is True for real tokens; None means that all are real.
        """
        if token_mask_BN is not None:
            self.packing = Packing.of_mask(token_mask_BN)
        self.foreground_BN, self.num_auxiliary = foreground_BN, num_auxiliary
        try:
            yield
        finally:
            self.packing, self.foreground_BN, self.num_auxiliary = None, None, 0

    @contextmanager
    def replay(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Restore a copy of ``vars(context)`` while a layer is recomputed.

        Records are discarded: those of the first run are already in the losses.
        """
        present = dict(vars(self))
        vars(self).update(state, records={})
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(present)

    @property
    def votes_BG(self) -> Tensor | None:
        """Group votes of each image so far; None before the first vote."""
        votes = [r.votes_BG for r in self.records.values() if r.votes_BG is not None]
        return votes[-1] if votes else None

    def add(self, name: str, record: RoutingRecord) -> None:
        """Keep a layer's record for the rest of the step; ignored outside of a step."""
        if self.is_open:
            self.records[name] = record

    def layer_gates(self, name: str) -> Tensor:
        """Return the gates (images, channels) of a gated layer; needs an open step."""
        if self.gates is None:
            raise RuntimeError(
                "gated layers run only inside of a step of their detector: call its "
                "loss, predict or forward, not its parts."
            )
        return self.gates.layers[name]


def _recomputed(
    layer: nn.Module, context: RoutingContext, *args: Any, **kwargs: Any
) -> Any:
    """Run a layer; in training it is recomputed in the backward pass.

    mmdet's ``num_cp`` needs fairscale and does not know about routing: when it
    recomputes a layer, the step is closed and its experts would see no groups and no
    mask. Here the second run reads what the first run read.
    """
    forward = type(layer).forward
    if not (layer.training and torch.is_grad_enabled()):
        return forward(layer, *args, **kwargs)
    state = dict(vars(context))
    return checkpoint(
        forward,
        layer,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), context.replay(state)),
        **kwargs,
    )


def take_num_cp(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Split ``num_cp`` of encoder and decoder from a copy of a detector's arguments.

    Raises:
        ConfigError: If a value is not a valid number of layers.
    """
    config, counts = dict(config), {}
    for component in ("encoder", "decoder"):
        value = (config.get(component) or {}).get("num_cp")
        if value is None:
            continue
        layers = config[component].get("num_layers", 0)  # of Transformers, none
        if type(value) is not int or not -1 <= value <= layers:
            raise ConfigError(
                f"model.{component}.num_cp, the number of layers to recompute, must be "
                f"an integer from 0 to {layers} (num_layers), or -1 for none, got "
                f"{value!r}."
            )
        config[component] = copy.copy(config[component])
        counts[component] = config[component].pop("num_cp")
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
            layer.forward = partial(_recomputed, layer, context)  # copied with it
