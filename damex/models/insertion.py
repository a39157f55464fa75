"""Insertion: replace feed-forward blocks of a built mmdet detector by experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from mmcv.cnn.bricks.transformer import FFN
from mmdet.registry import MODELS
from torch import nn

from damex.errors import ConfigError, did_you_mean
from damex.models.context import RoutingContext
from damex.models.moe_ffn import MoEFFN
from damex.models.moe_patch_conv import MoEPatchConv, conv_sites, uses_patches
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
    "router_stage",
)


@dataclass(frozen=True)
class InsertedLayer:
    """One replaced block: where and what it was, and what it costs now."""

    name: str
    dense: str
    num_experts: int
    dense_parameters: int
    moe_parameters: int


@dataclass(frozen=True)
class InsertionReport:
    """Every replaced block."""

    layers: tuple[InsertedLayer, ...]

    def __str__(self) -> str:
        rows = [
            f"  {row.name}: {row.dense} "
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

    With ``experts=dict(type='PatchConvExperts', patch_size=...)`` it is the last 3x3
    convolution of chosen stages of a ResNet: ``layers=dict(backbone=[3])``, a list of
    stage numbers, ``'all'`` or ``'last'``.

    Args:
        detector: A built detector with ``encoder.layers`` and ``decoder.layers``.
        moe: ``layers=dict(decoder=[0, 2, 4])`` (a list of layer numbers, ``'all'``, or
            ``'even'`` for 0, 2, 4 and so on; for ``encoder`` and ``decoder``),
            ``num_experts`` (the number of dataset groups by default), and the parts
            ``router``, ``gate``, ``experts`` and ``losses``, each a dict with a
            ``type``. ``shared_expert=dict(type='SharedExpert')`` adds an expert for
            all tokens. ``with_cp=True`` recomputes experts in the backward pass to save
            memory. ``router_stage`` is for the detector, see
            :mod:`damex.models.router_stage`. It is not changed.
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
    num_experts = _num_experts(moe.get("num_experts"), num_groups)
    groups = expert_groups(num_groups, num_experts) if num_groups else None
    make = partial(_insert_ffns, detector, moe, context)
    if uses_patches(moe):
        make = partial(_insert_patch_convs, detector, moe, context)
    return InsertionReport(tuple(make(num_experts, groups)))


def moe_blocks(detector: nn.Module) -> list[MoEFFN | MoEPatchConv]:
    """The MoE blocks of a detector in the order of computation."""
    return [m for m in detector.modules() if isinstance(m, (MoEFFN, MoEPatchConv))]


def _insert_ffns(
    detector: nn.Module,
    moe: Mapping[str, Any],
    context: RoutingContext,
    num_experts: int,
    groups: Sequence[Sequence[int]] | None,
) -> Iterator[InsertedLayer]:
    for name, layer in _chosen_layers(detector, moe.get("layers") or {}):
        dense = layer.ffn
        layer.ffn = block = MoEFFN(
            _build_layer(moe, dense, num_experts, groups),
            name=name,
            context=context,
            with_cp=bool(moe.get("with_cp")),
        )
        width = dense.embed_dims
        yield InsertedLayer(
            name=name,
            dense=f"FFN {width}-{dense.feedforward_channels}-{width}",
            num_experts=num_experts,
            dense_parameters=_count(dense),
            moe_parameters=_count(block),
        )


def _insert_patch_convs(
    detector: nn.Module,
    moe: Mapping[str, Any],
    context: RoutingContext,
    num_experts: int,
    groups: Sequence[Sequence[int]] | None,
) -> Iterator[InsertedLayer]:
    for site in conv_sites(detector, moe["layers"]["backbone"]):
        conv = site.conv
        experts = _build(
            moe["experts"],
            None,
            "experts",
            num_experts=num_experts,
            in_channels=conv.in_channels,
            out_channels=conv.out_channels,
            kernel_size=conv.kernel_size[0],
        )
        block = MoEPatchConv(
            _assemble(moe, experts, experts.embed_dims, num_experts, groups),
            name=site.name,
            context=context,
            with_cp=bool(moe.get("with_cp")),
        )
        site.replace(block)
        side, widths = conv.kernel_size[0], f"{conv.in_channels}-{conv.out_channels}"
        yield InsertedLayer(
            name=site.name,
            dense=f"convolution {widths} {side}x{side}",
            num_experts=num_experts,
            dense_parameters=_count(conv),
            moe_parameters=_count(block),
        )


def _num_experts(num_experts: int | None, num_groups: int | None) -> int:
    if num_experts is None:
        if num_groups is None:
            raise ConfigError(
                "moe.num_experts is not set and there is no mixture to take it "
                "from; set num_experts, or train on a MixtureDataset."
            )
        return num_groups
    if not isinstance(num_experts, int) or num_experts < 1:
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
    if not any(layers.get(part) not in (None, [], ()) for part in PARTS):
        raise ConfigError(
            "moe.layers chooses no layer, so the detector would stay dense; set "
            "layers=dict(decoder=[0, 2, 4]), or moe=None for a dense detector."
        )
    for part in layers:
        if part not in PARTS:
            raise ConfigError(
                f"moe.layers has the unknown part {part!r}; {did_you_mean(part, PARTS)}"
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
            f"model.{part}.num_cp wraps layer {number}, which would run its experts a "
            "second time without what they need; set num_cp=0 and moe.with_cp=True."
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
    experts = _build(moe.get("experts"), "FFNExperts", "experts", **shape, **ffn)
    return _assemble(
        moe,
        experts,
        dense.embed_dims,
        num_experts,
        groups,
        shared_expert=_shared_expert(moe, embed_dims=dense.embed_dims, **ffn),
    )


def _assemble(
    moe: Mapping[str, Any],
    experts: Any,
    embed_dims: int,
    num_experts: int,
    groups: Sequence[Sequence[int]] | None,
    *,
    shared_expert: Any = None,
) -> MoELayer:
    """Router, gate and losses of the config around built experts."""
    losses = moe.get("losses") or []
    if not isinstance(losses, (list, tuple)):
        raise ConfigError(f"moe.losses must be a list of dicts, got {losses!r}.")
    gate = _build(
        moe.get("gate"), "TopKGate", "gate", offer=dict(num_experts=num_experts)
    )
    if getattr(gate, "k", 1) > num_experts:
        raise ConfigError(
            f"moe.gate.k is {gate.k}, but there are {num_experts} experts; set k to "
            f"{num_experts} or less."
        )
    try:
        return MoELayer(
            router=_build(
                moe.get("router"),
                "LinearRouter",
                "router",
                offer=dict(num_groups=len(groups)) if groups else {},
                num_experts=num_experts,
                embed_dims=embed_dims,
            ),
            gate=gate,
            experts=experts,
            shared_expert=shared_expert,
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
        raise ConfigError(f"moe.{field} must be a dict with a type, got {config!r}.")
    own = {
        name: _build(value, None, f"{field}.{name}", offer=offer)
        if isinstance(value, Mapping) and "type" in value
        else value
        for name, value in (config or {}).items()
    }
    kind = own.pop("type", default)
    part = MODELS.get(kind) if isinstance(kind, str) else kind
    if part is None:
        known = sorted(n for n, m in MODELS.module_dict.items() if _is_moe_part(m))
        raise ConfigError(
            f"moe.{field} has the unknown type {str(kind)!r}; "
            f"{did_you_mean(str(kind), known)}"
        )
    named = inspect.signature(part).parameters
    wanted = {name: value for name, value in offer.items() if name in named}
    try:
        return MODELS.build({"type": kind, **values, **wanted, **own})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"moe.{field} = {dict(config or {})}: {error}") from error


def _is_moe_part(module: type) -> bool:
    return module.__module__.startswith("damex.moe")


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
