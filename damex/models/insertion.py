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
from damex.models.block_options import read_block_options, take_closing_norm
from damex.models.context import RoutingContext
from damex.models.fine_grained import FineGrained, SplitStart, read_fine_grained
from damex.models.moe_ffn import MoEFFN
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
    "block",
    "fine_grained",
)


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
    """Every replaced block, and what a user should know about the choice."""

    layers: tuple[InsertedLayer, ...]
    notes: tuple[str, ...] = ()

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
            memory. ``block=dict(norm='pre', drop_path=0.2)`` is described in
            `BlockOptions`, ``fine_grained=dict(parts=2, copies=4)`` in `FineGrained`.
            It is not changed.
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
    fine = read_fine_grained(moe.get("fine_grained"))
    options = read_block_options(moe.get("block"))
    asked = moe.get("num_experts")
    if fine is not None:
        fine.check_fields(num_experts=asked, norm=options.norm)
        asked = fine.num_experts
    num_experts = _num_experts(asked, num_groups)
    groups = _groups(num_groups, num_experts, fine)
    rows = []
    for name, layer in _chosen_layers(detector, moe.get("layers") or {}):
        dense = layer.ffn
        block = _build_block(moe, layer, num_experts, groups, fine, name, context)
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
    return InsertionReport(tuple(rows), _notes(moe_blocks(detector), groups))


def moe_blocks(detector: nn.Module) -> list[MoEFFN]:
    """The MoE blocks of a detector in the order of computation."""
    return [m for m in detector.modules() if isinstance(m, MoEFFN)]


def _groups(
    num_groups: int | None, num_experts: int, fine: FineGrained | None
) -> tuple[tuple[int, ...], ...] | None:
    """The experts of each dataset group; None outside of a mixture."""
    if not num_groups:
        return None
    if fine is not None:
        return fine.groups(num_groups)
    return expert_groups(num_groups, num_experts)


def _notes(
    blocks: Sequence[MoEFFN], groups: Sequence[Sequence[int]] | None
) -> tuple[str, ...]:
    """Says it where the dataset loss asks for what the gate cannot do."""
    if groups is None or not blocks:
        return ()
    moe = blocks[0].moe
    k, fewest = getattr(moe.gate, "k", 1), min(len(experts) for experts in groups)
    if k <= fewest or not any(loss.needs_groups for loss in moe.losses):
        return ()
    return (
        f"moe.gate.k is {k}, but a dataset group has {fewest} of the "
        f"{moe.num_experts} experts: its tokens always reach experts of other groups, "
        f"too, against what moe.losses teaches; set k={fewest}, or "
        f"num_experts={k * len(groups)} or more.",
    )


def _build_block(
    moe: Mapping[str, Any],
    layer: Any,
    num_experts: int,
    groups: Sequence[Sequence[int]] | None,
    fine: FineGrained | None,
    name: str,
    context: RoutingContext,
) -> MoEFFN:
    """The MoE block that takes the place of a layer's FFN."""
    built = _build_layer(moe, layer.ffn, num_experts, groups, fine)
    options = read_block_options(moe.get("block"))
    split = None
    if fine is not None:
        fine.check(built)
        hidden_dims = layer.ffn.feedforward_channels
        split = SplitStart(parts=fine.parts, hidden_dims=hidden_dims)
    try:
        return MoEFFN(
            built,
            name=name,
            context=context,
            with_cp=bool(moe.get("with_cp")),
            norm=take_closing_norm(layer, name) if options.norm == "pre" else None,
            drop_path=options.drop_path,
            split=split,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"moe.fine_grained: {error}") from error


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
        for number in layer_numbers(chosen, len(existing), part):
            yield f"{part}.{number}", transformer_layer(existing, part, number)


def layer_numbers(chosen: Any, count: int, part: str) -> Sequence[Any]:
    """Layer numbers behind a choice: a list, 'all' or 'even'.

    Args:
        chosen: What ``moe.layers`` says about a part.
        count: How many layers the part has.
        part: Its name, for the message.

    Raises:
        ConfigError: If it is no choice. That the layers exist is checked elsewhere.
    """
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


def transformer_layer(existing: Sequence[Any], part: str, number: Any) -> Any:
    """A transformer layer whose FFN can be replaced.

    Args:
        existing: The layers of a part.
        part: Its name, for messages.
        number: Which of them.

    Raises:
        ConfigError: If it does not exist, is run a second time by gradient
            checkpointing, or has no FFN.
    """
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
    fine: FineGrained | None,
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
        hidden_dims=fine.width(dense.feedforward_channels)
        if fine is not None
        else dense.feedforward_channels,
        activation=type(activation).__name__.lower(),
        dropout=dropout.p,
    )
    losses = moe.get("losses") or []
    if not isinstance(losses, (list, tuple)):
        raise ConfigError(f"moe.losses must be a list of dicts, got {losses!r}.")
    gate_config = moe.get("gate")
    if fine is not None:
        gate_config = {**fine.gate, **(gate_config or {})}
    gate = build_part(
        gate_config, "TopKGate", "gate", offer=dict(num_experts=num_experts)
    )
    if getattr(gate, "k", 1) > num_experts:
        raise ConfigError(
            f"moe.gate.k is {gate.k}, but there are {num_experts} experts; set k to "
            f"{num_experts} or less."
        )
    try:
        return MoELayer(
            router=build_part(
                moe.get("router"),
                "LinearRouter",
                "router",
                offer=dict(num_groups=len(groups)) if groups else {},
                **shape,
            ),
            gate=gate,
            experts=build_part(
                moe.get("experts"), "FFNExperts", "experts", **shape, **ffn
            ),
            shared_expert=_shared_expert(moe, embed_dims=dense.embed_dims, **ffn),
            losses=[build_part(cfg, None, "losses") for cfg in losses],
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
    return build_part(config, "SharedExpert", "shared_expert", **values)


def build_part(
    config: Mapping[str, Any] | None,
    default: str | None,
    field: str,
    *,
    offer: Mapping[str, Any] = MappingProxyType({}),
    **values: Any,
) -> Any:
    """Build one part; values of the config win over the defaults.

    What is in ``offer`` is handed only to a part whose ``__init__`` names it. A value
    that is a dict is a part, too, and needs a ``type``.
    """
    own = {
        name: build_part(value, None, f"{field}.{name}", offer=offer)
        if isinstance(value, Mapping)
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
