"""Insertion: replace blocks of a built mmdet detector by experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmcv.cnn.bricks.transformer import FFN
from mmdet.registry import MODELS
from torch import nn

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN, MoEPatchConv
from damex.models.build import assemble_layer, build_part
from damex.models.config import InsertionPlan, layers_of, read_plan, take_closing_norm
from damex.models.context import RoutingContext
from damex.models.fine_grained import SplitStart
from damex.models.sites import ConvSite, chosen_layers, conv_sites
from damex.moe import (
    DenseSoftmaxGate,
    ExpertChoiceGate,
    LoadBalanceLoss,
    MoELayer,
    PatchConvExperts,
    RoutingLoss,
)

__all__ = [
    "InsertedLayer",
    "InsertionReport",
    "check_denoising",
    "count_parameters",
    "insert_ffns",
    "insert_moe",
    "insert_patch_convs",
    "moe_blocks",
    "uses_patches",
]


def insert_moe(
    detector: nn.Module,
    moe: Mapping[str, Any],
    *,
    context: RoutingContext,
    num_groups: int | None,
) -> InsertionReport:
    """Replace the FFNs of chosen transformer layers by MoE blocks.

    Experts that convolve patches replace convolutions of a ResNet instead.

    Args:
        detector: A built detector with ``encoder.layers`` and ``decoder.layers``.
        moe: ``layers=dict(decoder=[0, 2, 4])`` (a list of layer numbers, ``'all'``, or
            ``'even'`` for 0, 2, 4 and so on; for ``encoder`` and ``decoder``; stages
            for ``backbone``, or ``'last'``), ``num_experts`` (the number of dataset
            groups by default), and the parts ``router``, ``gate``, ``experts`` and
            ``losses``, each a dict with a ``type``.
            ``shared_expert=dict(type='SharedExpert')`` adds an expert for all tokens.
            ``with_cp=True`` recomputes experts in the backward pass to save memory.
            ``block=dict(norm='pre', drop_path=0.2)`` is described in `BlockOptions`,
            ``fine_grained=dict(parts=2, copies=4)`` in `FineGrained`, ``router_stage``
            in :mod:`damex.engine.schedule`. It is not changed.
        context: What the blocks read and write during a forward pass.
        num_groups: Number of dataset groups; None outside of a mixture.

    Returns:
        What was replaced.

    Raises:
        ConfigError: If a field is unknown, a layer does not exist or has no FFN,
            nothing is chosen, a part works with groups and there are more of them than
            experts, or denoising queries would compete with others.
    """
    plan = read_plan(moe, context=context, num_groups=num_groups)
    insert = insert_patch_convs if uses_patches(moe) else insert_ffns
    layers = tuple(insert(detector, plan))
    blocks = moe_blocks(detector)
    check_denoising(detector, blocks)
    return InsertionReport(layers, _notes(blocks, plan.groups))


def moe_blocks(detector: nn.Module) -> list[MoEFFN | MoEPatchConv]:
    """The MoE blocks of a detector in the order of computation."""
    return [m for m in detector.modules() if isinstance(m, (MoEFFN, MoEPatchConv))]


def _notes(
    blocks: Sequence[MoEFFN | MoEPatchConv], groups: Sequence[Sequence[int]] | None
) -> tuple[str, ...]:
    """Says it where a loss asks for what the gate cannot do."""
    if not blocks:
        return ()
    moe = blocks[0].moe
    return (*_dataset_notes(moe, groups), *_balance_notes(moe))


def _dataset_notes(
    moe: MoELayer, groups: Sequence[Sequence[int]] | None
) -> tuple[str, ...]:
    if groups is None:
        return ()
    k, fewest = getattr(moe.gate, "k", 1), min(len(experts) for experts in groups)
    if k <= fewest or not any(loss.needs_groups for loss in moe.losses):
        return ()
    return (
        f"moe.gate.k is {k}, but a dataset group has {fewest} of the "
        f"{moe.num_experts} experts: its tokens always reach experts of other groups, "
        f"too, against what moe.losses teaches; set k={fewest}, or "
        f"num_experts={k * len(groups)} or more.",
    )


def _balance_notes(moe: MoELayer) -> tuple[str, ...]:
    return tuple(
        f"moe.losses: LoadBalanceLoss cannot teach anything here, as "
        f"{type(moe.gate).__name__} gives each expert the same load: the loss is 1 "
        "whatever the router does; remove it."
        for loss in moe.losses
        if _is_constant(loss, moe)
    )


def _is_constant(loss: RoutingLoss, moe: MoELayer) -> bool:
    if not isinstance(loss, LoadBalanceLoss):
        return False
    if isinstance(moe.gate, ExpertChoiceGate):  # uneven on a part of the tokens
        return loss.tokens == "all"
    return isinstance(moe.gate, DenseSoftmaxGate)


def check_denoising(
    detector: nn.Module, blocks: Iterable[MoEFFN | MoEPatchConv]
) -> None:
    """Refuse gates that would let denoising queries push out matching ones.

    Denoising queries are made of the ground truth. DINO's attention mask hides them
    from the matching queries, but experts that choose among all tokens of an image
    would choose among both, and at test time there are no denoising queries.

    Args:
        detector: A built detector.
        blocks: Its MoE blocks.

    Raises:
        ConfigError: If experts choose tokens in a decoder with denoising queries.
    """
    if getattr(detector, "dn_query_generator", None) is None:
        return
    for block in blocks:
        in_decoder = block.name.startswith("decoder.")
        if in_decoder and isinstance(block.moe.gate, ExpertChoiceGate):
            raise ConfigError(
                f"moe.gate is {type(block.moe.gate).__name__} and moe.layers chooses "
                f"{block.name}, where denoising queries, made of the ground truth, "
                "would compete with the matching queries in training alone; set "
                "moe.layers=dict(encoder='even'), or another gate such as TopKGate, or "
                "use a detector without denoising queries such as MoEDeformableDETR."
            )


def insert_ffns(detector: nn.Module, plan: InsertionPlan) -> Iterator[InsertedLayer]:
    """Replace the FFNs that the config chooses.

    Args:
        detector: A built detector.
        plan: What to put into it.

    Yields:
        Each replaced FFN.

    Raises:
        ConfigError: If a layer does not exist or its FFN cannot be replaced.
    """
    for name, layer in chosen_layers(detector, layers_of(plan.moe)):
        dense = layer.ffn
        layer.ffn = block = _build_block(plan, layer, name)
        width = dense.embed_dims
        yield InsertedLayer(
            name=name,
            dense=f"FFN {width}-{dense.feedforward_channels}-{width}",
            num_experts=plan.num_experts,
            dense_parameters=count_parameters(dense),
            moe_parameters=count_parameters(block),
        )


def _build_block(plan: InsertionPlan, layer: Any, name: str) -> MoEFFN:
    """The MoE block that takes the place of a layer's FFN."""
    built = _build_layer(plan, layer.ffn)
    split = None
    if plan.fine is not None:
        plan.fine.check(built)
        hidden_dims = layer.ffn.feedforward_channels
        split = SplitStart(parts=plan.fine.parts, hidden_dims=hidden_dims)
    is_pre_norm = plan.options.norm == "pre"
    try:
        return MoEFFN(
            built,
            name=name,
            context=plan.context,
            with_cp=plan.with_cp,
            norm=take_closing_norm(layer, name) if is_pre_norm else None,
            drop_path=plan.options.drop_path,
            split=split,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"moe.fine_grained: {error}") from error


def _build_layer(plan: InsertionPlan, dense: FFN) -> MoELayer:
    """One MoE layer with the width, activation and dropout of the FFN it replaces."""
    if dense.num_fcs != 2 or not dense.add_identity:
        raise ConfigError(
            "experts can replace mmcv FFNs with num_fcs=2 and add_identity=True only, "
            f"got num_fcs={dense.num_fcs}, add_identity={dense.add_identity}."
        )
    activation, dropout = dense.layers[0][1], dense.layers[0][2]
    fine, hidden_dims = plan.fine, dense.feedforward_channels
    ffn = dict(
        embed_dims=dense.embed_dims,
        hidden_dims=hidden_dims if fine is None else fine.width(hidden_dims),
        activation=type(activation).__name__.lower(),
        dropout=dropout.p,
    )
    experts = build_part(
        plan.moe.get("experts"),
        "FFNExperts",
        "experts",
        num_experts=plan.num_experts,
        **ffn,
    )
    shared = plan.moe.get("shared_expert")
    return assemble_layer(
        plan.moe,
        experts,
        embed_dims=dense.embed_dims,
        num_experts=plan.num_experts,
        groups=plan.groups,
        gate_defaults={} if fine is None else fine.gate,
        shared_expert=None
        if shared is None
        else build_part(shared, "SharedExpert", "shared_expert", **ffn),
    )


def uses_patches(moe: Mapping[str, Any]) -> bool:
    """Whether the experts convolve patches, and so belong into the backbone.

    Raises:
        ConfigError: If the experts do not fit the layers that are chosen for them.
    """
    layers = layers_of(moe)
    experts = moe.get("experts") or {}
    if not isinstance(experts, Mapping):
        raise ConfigError(
            "moe.experts must be a dict with a type, such as dict(type='FFNExperts'), "
            f"got {experts!r}."
        )
    kind = experts.get("type", "FFNExperts")
    part = MODELS.get(kind) if isinstance(kind, str) else kind
    on_patches = inspect.isclass(part) and issubclass(part, PatchConvExperts)
    chosen = layers.get("backbone") not in (None, [], ())
    if chosen and not on_patches:
        raise ConfigError(
            "moe.layers.backbone needs experts that convolve patches; set moe.experts="
            f"dict(type='PatchConvExperts', patch_size=2), got the type {kind!r}."
        )
    if not on_patches:
        return False
    others = [part for part in layers if part != "backbone"]
    if others or not chosen:
        raise ConfigError(
            f"moe.experts has the type {kind!r}, which replaces convolutions; set "
            f"moe.layers=dict(backbone=[3]) or 'last', got {dict(layers)!r}."
        )
    if moe.get("shared_expert") is not None:
        raise ConfigError(
            f"moe.shared_expert is an FFN and cannot stand beside {kind!r}; leave it "
            "out."
        )
    return True


def insert_patch_convs(
    detector: nn.Module, plan: InsertionPlan
) -> Iterator[InsertedLayer]:
    """Replace the convolutions that the config chooses.

    Args:
        detector: A built detector with a ResNet of mmdet.
        plan: What to put into it.

    Yields:
        Each replaced convolution.

    Raises:
        ConfigError: If a stage does not exist or cannot take experts.
    """
    for site in conv_sites(detector, plan.moe["layers"]["backbone"]):
        block = _build_patch_block(plan, site)
        site.replace(block)
        conv = site.conv
        side, widths = conv.kernel_size[0], f"{conv.in_channels}-{conv.out_channels}"
        yield InsertedLayer(
            name=site.name,
            dense=f"convolution {widths} {side}x{side}",
            num_experts=plan.num_experts,
            dense_parameters=count_parameters(conv),
            moe_parameters=count_parameters(block),
        )


def _build_patch_block(plan: InsertionPlan, site: ConvSite) -> MoEPatchConv:
    conv = site.conv
    experts = build_part(
        plan.moe["experts"],
        None,
        "experts",
        num_experts=plan.num_experts,
        in_channels=conv.in_channels,
        out_channels=conv.out_channels,
        kernel_size=conv.kernel_size[0],
    )
    layer = assemble_layer(
        plan.moe,
        experts,
        embed_dims=experts.embed_dims,
        num_experts=plan.num_experts,
        groups=plan.groups,
    )
    return MoEPatchConv(
        layer, name=site.name, context=plan.context, with_cp=plan.with_cp
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
    """Every replaced block.

    Attributes:
        layers: In the order of computation.
        notes: What works but is hardly meant, each in a sentence.
    """

    layers: tuple[InsertedLayer, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [
            f"  {row.name}: {row.dense} ({row.dense_parameters:,} parameters) -> "
            f"{row.num_experts} experts ({row.moe_parameters:,})"
            for row in self.layers
        ]
        return "\n".join([f"experts in {len(rows)} layers:", *rows])


def count_parameters(module: nn.Module) -> int:
    """Number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())
