"""Insertion: replace feed-forward blocks of a built mmdet detector by experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mmcv.cnn.bricks.transformer import FFN
from mmdet.registry import MODELS
from torch import nn

from damex.errors import ConfigError, did_you_mean
from damex.models.context import RoutingContext
from damex.models.moe_ffn import MoEFFN
from damex.models.part_arguments import check_arguments
from damex.moe import MoELayer, expert_groups

__all__ = ["InsertedLayer", "InsertionReport", "insert_moe", "moe_blocks"]

PARTS = ("encoder", "decoder")
MOE_FIELDS = (
    "layers",
    "num_experts",
    "router",
    "gate",
    "experts",
    "shared_expert",
    "losses",
    "with_cp",
)
# Where damex keeps the parts for a field.
FOLDERS = MappingProxyType({"router": "routers", "gate": "gates", "losses": "losses"})


@dataclass(frozen=True)
class InsertedLayer:
    """One replaced feed-forward block: where it was, and what it costs now."""

    name: str
    embed_dims: int
    hidden_dims: int
    num_experts: int
    dense_parameters: int
    moe_parameters: int


@dataclass(frozen=True)
class InsertionReport:
    """Every replaced block."""

    layers: tuple[InsertedLayer, ...]

    def __str__(self) -> str:
        rows = [
            f"  {row.name}: FFN {row.embed_dims}-{row.hidden_dims}-{row.embed_dims} "
            f"({row.dense_parameters:,} parameters) -> {row.num_experts} experts "
            f"({row.moe_parameters:,})"
            for row in self.layers
        ]
        return "\n".join([f"experts in {len(rows)} layers:", *rows])


def insert_moe(
    detector: nn.Module,
    moe: Mapping[str, Any],
    *,
    context: RoutingContext,
    num_groups: int | None,
) -> InsertionReport:
    """Replace the FFNs of chosen transformer layers by MoE blocks.

    Args:
        detector: A built detector with ``encoder.layers`` and ``decoder.layers``.
        moe: ``layers=dict(decoder=[0, 2, 4])`` (a list of layer numbers, ``'all'``, or
            ``'even'`` for 0, 2, 4 and so on; for ``encoder`` and ``decoder``),
            ``num_experts`` (the number of dataset groups by default), and the parts
            ``router``, ``gate``, ``experts`` and ``losses``, each a dict with a
            ``type``. ``shared_expert=dict(type='SharedExpert')`` adds an expert for
            all tokens. ``with_cp=True`` recomputes experts in the backward pass to save
            memory. It is not changed.
        context: What the blocks read and write during a forward pass.
        num_groups: Number of dataset groups; None outside of a mixture.

    Returns:
        What was replaced.

    Raises:
        ConfigError: If a field is unknown, a layer does not exist or has no FFN,
            nothing is chosen, or there are more groups than experts.
    """
    for key in moe:
        if key not in MOE_FIELDS:
            raise ConfigError(
                f"moe has the unknown key {key!r}; {did_you_mean(key, MOE_FIELDS)}"
            )
    with_cp = moe.get("with_cp")
    if with_cp not in (None, True, False):
        raise ConfigError(f"moe.with_cp must be True or False, got {with_cp!r}.")
    num_experts = _num_experts(moe.get("num_experts"), num_groups)
    groups = expert_groups(num_groups, num_experts) if num_groups else None
    rows = []
    for name, layer in _chosen_layers(detector, moe.get("layers") or {}):
        dense = layer.ffn
        block = MoEFFN(
            _build_layer(moe, dense, num_experts, groups),
            name=name,
            context=context,
            with_cp=bool(with_cp),
        )
        layer.ffn = block
        rows.append(
            InsertedLayer(
                name=name,
                embed_dims=dense.embed_dims,
                hidden_dims=dense.feedforward_channels,
                num_experts=num_experts,
                dense_parameters=_count(dense),
                moe_parameters=_count(block),
            )
        )
    return InsertionReport(tuple(rows))


def moe_blocks(detector: nn.Module) -> list[MoEFFN]:
    """The MoE blocks of a detector in the order of computation."""
    return [m for m in detector.modules() if isinstance(m, MoEFFN)]


def _num_experts(num_experts: int | None, num_groups: int | None) -> int:
    if num_experts is None:
        if num_groups is None:
            raise ConfigError(
                "moe.num_experts is not set and there is no mixture to take it "
                "from; set num_experts, or train on a MixtureDataset."
            )
        return num_groups
    if type(num_experts) is not int or num_experts < 1:
        raise ConfigError(
            f"moe.num_experts must be an integer of 1 or more, got {num_experts!r}."
        )
    if num_groups is not None and num_groups > num_experts:
        raise ConfigError(
            f"the mixture has {num_groups} dataset groups but moe.num_experts is "
            f"{num_experts}; set num_experts={num_groups} or more, or let datasets "
            "share experts by giving their mixture entries the same group='...'."
        )
    return num_experts


def _chosen_layers(
    detector: nn.Module, layers: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Name and module of every transformer layer that the config chooses."""
    if not isinstance(layers, Mapping):
        raise ConfigError(
            "moe.layers must be a dict such as dict(decoder=[0, 2, 4]), got "
            f"{layers!r}."
        )
    for part in layers:
        if part not in PARTS:
            raise ConfigError(
                f"moe.layers has the unknown part {part!r}; {did_you_mean(part, PARTS)}"
            )
    if not any(layers.get(part) not in (None, [], ()) for part in PARTS):
        raise ConfigError(
            f"moe.layers = {dict(layers)} chooses no layer, so the detector would stay "
            "dense; set layers=dict(decoder=[0, 2, 4]), or moe=None for a dense "
            "detector."
        )
    for part in PARTS:
        chosen = layers.get(part)
        if chosen is None:
            continue
        existing = getattr(getattr(detector, part, None), "layers", [])
        for number in _numbers(chosen, len(existing), part):
            yield f"{part}.{number}", _layer(existing, part, number)


def _numbers(chosen: Any, count: int, part: str) -> Sequence[Any]:
    """Layer numbers behind a choice."""
    if chosen == "all":
        return range(count)
    if chosen == "even":
        return range(0, count, 2)
    if not isinstance(chosen, (list, tuple)):
        raise ConfigError(
            f"moe.layers.{part} must be a list of layer numbers, 'all' or 'even', "
            f"got {chosen!r}."
        )
    return chosen


def _layer(existing: Sequence[Any], part: str, number: Any) -> Any:
    if type(number) is not int or not 0 <= number < len(existing):
        raise ConfigError(
            f"moe.layers.{part} names layer {number!r}, but the {part} has "
            f"{len(existing)} layers: 0 to {len(existing) - 1}."
        )
    layer = existing[number]
    if "forward" in vars(layer):
        raise ConfigError(
            f"model.{part}.num_cp of mmdet wraps layer {number}, which would run its "
            "experts a second time without what they need; use a detector of damex "
            "(type='MoEDINO' and so on), or set num_cp=0 and moe.with_cp=True."
        )
    if not isinstance(getattr(layer, "ffn", None), FFN):
        raise ConfigError(
            f"moe.layers.{part}: layer {number} ({type(layer).__name__}) has no "
            "mmcv FFN in its attribute 'ffn' (listed twice, or replaced already?)."
        )
    return layer


def _build_layer(
    moe: Mapping[str, Any],
    dense: FFN,
    num_experts: int,
    groups: Sequence[Sequence[int]] | None,
) -> MoELayer:
    """One MoE layer with the width, activation and dropout of the FFN it replaces."""
    if dense.num_fcs != 2 or not dense.add_identity:
        raise ConfigError(
            "experts can replace mmcv FFNs with num_fcs=2 and add_identity=True only, "
            f"got num_fcs={dense.num_fcs}, add_identity={dense.add_identity}."
        )
    activation, dropout = dense.layers[0][1], dense.layers[0][2]
    shape = dict(num_experts=num_experts, embed_dims=dense.embed_dims)
    ffn = dict(
        hidden_dims=dense.feedforward_channels,
        activation=type(activation).__name__.lower(),
        dropout=dropout.p,
    )
    losses = moe.get("losses") or []
    if not isinstance(losses, (list, tuple)):
        raise ConfigError(f"moe.losses must be a list of dicts, got {losses!r}.")
    gate = _build(
        moe.get("gate"), "TopKGate", "gate", offer=dict(num_experts=num_experts)
    )
    for name in ("k", "end_k"):
        k = getattr(gate, name, None)
        if k is not None and k > num_experts:
            raise ConfigError(
                f"moe.gate.{name} is {k}, but there are {num_experts} experts; set "
                f"{name} to {num_experts} or less."
            )
    try:
        return MoELayer(
            router=_build(
                moe.get("router"),
                "LinearRouter",
                "router",
                offer=dict(num_groups=len(groups)) if groups else {},
                **shape,
            ),
            gate=gate,
            experts=_build(moe.get("experts"), "FFNExperts", "experts", **shape, **ffn),
            shared_expert=_shared_expert(moe, embed_dims=dense.embed_dims, **ffn),
            losses=[_build(cfg, None, "losses") for cfg in losses],
            group_experts=groups,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"moe: {error}") from error


def _shared_expert(moe: Mapping[str, Any], **values: Any) -> Any:
    config = moe.get("shared_expert")
    if config is None:
        return None
    return _build(config, "SharedExpert", "shared_expert", **values)


def _build(
    config: Mapping[str, Any] | None,
    default: str | None,
    field: str,
    *,
    offer: Mapping[str, Any] = MappingProxyType({}),
    **values: Any,
) -> Any:
    """Build one part; values of the config win over the defaults.

    What is in ``offer`` is handed only to a part whose ``__init__`` names it. A value
    that is a dict with a ``type`` is a part, too.
    """
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"moe.{field} must be a dict with a type, such as "
            f"dict(type={default or 'LoadBalanceLoss'!r}), got {config!r}."
        )
    own = {
        name: _build(value, None, f"{field}.{name}", offer=offer)
        if isinstance(value, Mapping) and "type" in value
        else value
        for name, value in (config or {}).items()
    }
    kind = own.pop("type", default)
    part = MODELS.get(kind) if isinstance(kind, str) else kind
    if part is None:
        known = _known_parts(field)
        raise ConfigError(
            f"moe.{field} has the unknown type {str(kind)!r}; "
            f"{did_you_mean(str(kind), known)}"
        )
    named = inspect.signature(part).parameters
    wanted = {name: value for name, value in offer.items() if name in named}
    check_arguments(part, own, field=f"moe.{field}")
    try:
        return MODELS.build({"type": kind, **values, **wanted, **own})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"moe.{field} = {dict(config or {})}: {error}") from error


def _known_parts(field: str) -> list[str]:
    """Names of the parts that stand in damex for a field, or of all parts."""
    folder = f"damex.moe.{FOLDERS.get(field, '')}"
    return sorted(
        name
        for name, part in MODELS.module_dict.items()
        if part.__module__.startswith(folder)
    )


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
