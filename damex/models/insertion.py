"""Replace blocks of a built mmdet detector by experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.detectors import DeformableDETR
from torch import nn

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN, MoEPatchConv, activation_of
from damex.models.build import build_layer
from damex.models.config import MoEConfig
from damex.models.context import RoutingContext
from damex.models.dense_phase import DensePhase
from damex.models.expert_parallel import spread_experts
from damex.models.signatures import module_class
from damex.models.sites import chosen_layers, conv_sites
from damex.models.upcycling import SplitStart, closing_norm_becomes_own, gate_notes
from damex.moe import (
    DenseSoftmaxGate,
    ExpertChoiceGate,
    LoadBalanceLoss,
    MoELayer,
    PatchConvExperts,
    shared_hidden_dims,
    split_hidden_dims,
)


def insert_moe(
    detector: nn.Module,
    config: MoEConfig,
    *,
    context: RoutingContext,
    num_groups: int | None,
) -> InsertionReport:
    """Replace the FFNs of chosen transformer layers by MoE blocks.

    Patch-convolution experts replace convolutions of a ResNet instead. ``num_groups``
    is None outside of a mixture.

    Raises:
        ConfigError: If a layer does not exist or has no FFN, a module cannot be built
            or needs groups that outnumber the experts, denoising queries would compete
            with others, or experts cannot be sharded as configured.
    """
    insert = _insert_patch_convs if _uses_patches(config) else _insert_ffns
    layers = tuple(insert(detector, config, context=context, num_groups=num_groups))
    blocks = moe_blocks(detector)
    _check_denoising(detector, blocks)
    _check_foreground(detector, blocks)
    moe = blocks[0].moe
    notes = [*_dataset_notes(moe), *_balance_notes(moe), *_group_choice_notes(moe)]
    if config.upcycling is not None:
        notes += [f"moe.upcycling: {note}" for note in gate_notes(blocks)]
    layout = spread_experts(config, blocks)
    return InsertionReport(layers, tuple(notes), layout)


def moe_blocks(detector: nn.Module) -> list[MoEFFN | MoEPatchConv]:
    """Return the MoE blocks of a detector in the order of computation."""
    return [m for m in detector.modules() if isinstance(m, (MoEFFN, MoEPatchConv))]


def _dataset_notes(moe: MoELayer) -> tuple[str, ...]:
    """Warn if a loss teaches what the gate cannot do."""
    if moe.group_experts_GE is None:
        return ()
    k, fewest = getattr(moe.gate, "k", 1), int(moe.group_experts_GE.sum(1).min())
    if k <= fewest or not any(loss.needs_groups for loss in moe.losses):
        return ()
    return (
        f"moe.gate.k is {k}, but a dataset group has {fewest} of the "
        f"{moe.num_experts} experts: its tokens always reach experts of other groups, "
        f"too, against what moe.losses teaches; set k={fewest}, or "
        f"num_experts={k * len(moe.group_experts_GE)} or more.",
    )


def _balance_notes(moe: MoELayer) -> tuple[str, ...]:
    """Warn if each expert has the same load independently of the router."""
    balance = [loss for loss in moe.losses if isinstance(loss, LoadBalanceLoss)]
    if isinstance(moe.gate, ExpertChoiceGate):  # uneven on a subset of tokens
        balance = [loss for loss in balance if loss.tokens == "all"]
    elif not isinstance(moe.gate, DenseSoftmaxGate):
        return ()
    return tuple(
        f"moe.losses: LoadBalanceLoss cannot teach anything here, as "
        f"{type(moe.gate).__name__} gives each expert the same load: the loss is 1 "
        "whatever the router does; remove it."
        for _ in balance
    )


def _group_choice_notes(moe: MoELayer) -> Iterator[str]:
    """Warn about misleading scores, and about routers that learn nothing."""
    choice = moe.group_choice
    if choice.oracle:
        yield (
            "moe.oracle: in evaluation the dataset of each image chooses its experts; "
            "ALL SCORES ARE AN UPPER BOUND of routing by dataset, and NOT what users "
            "get."
        )
    if choice.teacher_forcing and not any(loss.needs_groups for loss in moe.losses):
        yield (
            "moe.teacher_forcing: nothing teaches the router which dataset a token "
            "comes from, which it has to know in evaluation; add "
            "dict(type='DatasetRoutingLoss', weight=0.1) to moe.losses."
        )
    is_one_to_one = moe.group_experts_GE is not None and all(
        experts_E.sum() == 1 for experts_E in moe.group_experts_GE
    )
    balance = any(isinstance(loss, LoadBalanceLoss) for loss in moe.losses)
    if choice.teacher_forcing and is_one_to_one and balance:
        yield (
            "moe.losses: with teacher_forcing and one expert per dataset group the "
            "datasets decide the load, which LoadBalanceLoss cannot change: it only "
            "pushes routers away from large datasets; remove it."
        )


def _check_denoising(
    detector: nn.Module, blocks: Iterable[MoEFFN | MoEPatchConv]
) -> None:
    """Reject gates where denoising queries push out matching ones, in training only."""
    if getattr(detector, "dn_query_generator", None) is None:
        return
    for block in blocks:
        # DINO's attention mask hides denoising queries, made of the ground truth, but
        # experts that choose among all tokens of an image see both kinds.
        in_decoder = block.name.startswith("decoder.")
        if in_decoder and isinstance(block.moe.gate, ExpertChoiceGate):
            raise ConfigError(
                f"moe.gate is {type(block.moe.gate).__name__} and moe.layers chooses "
                f"{block.name}, where denoising queries, made of the ground truth, "
                "would compete with the matching queries in training alone; set "
                "moe.layers=dict(encoder='even'), or another gate such as TopKGate, or "
                "use a detector without denoising queries such as MoEDeformableDETR."
            )


def counts_foreground(blocks: Iterable[MoEFFN | MoEPatchConv]) -> bool:
    """Whether any routing loss of the blocks is about foreground tokens."""
    losses = [loss for block in blocks for loss in block.moe.losses]
    return any(loss.tokens == "foreground" for loss in losses)


def _check_foreground(
    detector: nn.Module, blocks: Iterable[MoEFFN | MoEPatchConv]
) -> None:
    """Reject foreground losses for detectors without reference points."""
    if not counts_foreground(blocks):
        return
    if any(isinstance(block, MoEPatchConv) for block in blocks):
        raise ConfigError(
            "moe.losses: tokens='foreground' is for the transformer's experts, and "
            "moe.layers names the backbone; set tokens='all'."
        )
    if not isinstance(detector, DeformableDETR):
        raise ConfigError(
            "moe.losses: tokens='foreground' needs queries with reference points, "
            f"which {type(detector).__name__} has not; set tokens='all', or use "
            "MoEDINO, MoEDDQDETR or MoEDeformableDETR."
        )


def _insert_ffns(
    detector: nn.Module,
    config: MoEConfig,
    *,
    context: RoutingContext,
    num_groups: int | None,
) -> Iterator[InsertedLayer]:
    """Replace the FFNs that the config selects."""
    for component, numbers in config.layers.chosen.items():
        for name, layer in chosen_layers(detector, component, numbers):
            dense = layer.ffn
            moe, split = _build_ffn_experts(config, dense, num_groups)
            layer.ffn = block = MoEFFN(
                moe,
                name=name,
                context=context,
                dense=dense,
                with_cp=config.with_cp,
                norm=take_closing_norm(layer, name)
                if config.block.norm == "pre"
                else None,
                drop_path=config.block.drop_path,
                split=split,
                dense_phase=None if config.upcycling is None else DensePhase(),
            )
            width = dense.embed_dims
            replaced = f"FFN {width}-{dense.feedforward_channels}-{width}"
            yield _inserted(block, dense, replaced)


def _build_ffn_experts(
    config: MoEConfig, dense: FFN, num_groups: int | None
) -> tuple[MoELayer, SplitStart | None]:
    """Build a MoE layer with the width, activation and dropout of the FFN."""
    fine, width, split = config.fine_grained, dense.feedforward_channels, None
    shared_width = routed_width = width
    if fine is not None:
        split = SplitStart(parts=fine.routed, hidden_dims=width)
        sizes = dict(parts=fine.parts, shared=fine.shared)
        try:
            shared_width = shared_hidden_dims(width, **sizes)
            rest = width - shared_width
            routed_width = split_hidden_dims(rest, parts=fine.routed)
        except ValueError as error:
            raise ConfigError(f"moe.fine_grained: {error}") from error
    ffn = dict(
        embed_dims=dense.embed_dims,
        activation=activation_of(dense),
        dropout=dense.layers[0][2].p,
    )
    layer = build_layer(
        config,
        dict(**ffn, hidden_dims=routed_width),
        num_groups=num_groups,
        shared_expert=dict(**ffn, hidden_dims=shared_width),
    )
    return layer, split


def take_closing_norm(layer: nn.Module, name: str) -> nn.Module:
    """Take the norm after the feed-forward block out of a transformer layer.

    It is replaced by an identity. Weights of the closing norm in a checkpoint of the
    untouched layer are loaded into the block's own norm.

    Raises:
        ConfigError: If the layer does not end with a norm in its list ``norms``.
    """
    norms = getattr(layer, "norms", None)
    if not isinstance(norms, nn.ModuleList) or isinstance(norms[-1], nn.Identity):
        raise ConfigError(
            f"moe.block.norm='pre' needs a norm to move, but layer {name} "
            f"({type(layer).__name__}) has no list 'norms' that ends with one."
        )
    norm = norms[-1]
    norms[-1] = nn.Identity()
    layer.register_load_state_dict_pre_hook(closing_norm_becomes_own)
    return norm


def _uses_patches(config: MoEConfig) -> bool:
    """Whether the experts convolve patches, and so belong in the backbone."""
    module, chosen = module_class(config.experts), config.layers.chosen
    kind = config.experts["type"]
    if not (inspect.isclass(module) and issubclass(module, PatchConvExperts)):
        if "backbone" in chosen:
            raise ConfigError(
                "moe.layers.backbone needs experts that convolve patches; set "
                "moe.experts=dict(type='PatchConvExperts', patch_size=2), got the type "
                f"{kind!r}."
            )
        return False
    if list(chosen) != ["backbone"]:
        raise ConfigError(
            f"moe.experts has the type {kind!r}, which replaces convolutions; set "
            f"moe.layers=dict(backbone=[3]) or 'last', got {config.layers.given}."
        )
    if config.shared_expert is not None:
        raise ConfigError(
            f"moe.shared_expert is an FFN and cannot stand beside {kind!r}; leave it "
            "out."
        )
    if config.upcycling is not None:
        raise ConfigError(
            f"moe.upcycling makes every expert a copy of an FFN, and each {kind!r} is "
            "a part of a convolution; leave it out."
        )
    return True


def _insert_patch_convs(
    detector: nn.Module,
    config: MoEConfig,
    *,
    context: RoutingContext,
    num_groups: int | None,
) -> Iterator[InsertedLayer]:
    """Replace the convolutions of a ResNet that the config selects."""
    for name, residual in conv_sites(detector, config.layers.backbone):
        conv = residual.conv2
        channels = dict(in_channels=conv.in_channels, out_channels=conv.out_channels)
        side = conv.kernel_size[0]
        residual.conv2 = block = MoEPatchConv(
            build_layer(
                config, dict(**channels, kernel_size=side), num_groups=num_groups
            ),
            name=name,
            context=context,
            with_cp=config.with_cp,
        )
        widths = f"{conv.in_channels}-{conv.out_channels}"
        yield _inserted(block, conv, f"convolution {widths} {side}x{side}")


@dataclass(frozen=True)
class InsertedLayer:
    """One replaced block: its place, the dense module and the parameters."""

    name: str
    dense: str
    num_experts: int
    dense_parameters: int
    moe_parameters: int


@dataclass(frozen=True)
class InsertionReport:
    """Every replaced block, in the order of computation.

    Attributes:
        notes: Warnings about settings that work but are probably unintended.
        layout: Which process has which experts; empty if each has all.
    """

    layers: tuple[InsertedLayer, ...]
    notes: tuple[str, ...] = ()
    layout: str = ""

    def __str__(self) -> str:
        rows = [
            f"  {row.name}: {row.dense} ({row.dense_parameters:,} parameters) -> "
            f"{row.num_experts} experts ({row.moe_parameters:,})"
            for row in self.layers
        ]
        rows += [f"  {self.layout}"] if self.layout else []
        return "\n".join([f"experts in {len(self.layers)} layers:", *rows])


def _inserted(
    block: MoEFFN | MoEPatchConv, dense: nn.Module, description: str
) -> InsertedLayer:
    return InsertedLayer(
        name=block.name,
        dense=description,
        num_experts=block.moe.num_experts,
        dense_parameters=sum(p.numel() for p in dense.parameters()),
        moe_parameters=sum(p.numel() for p in block.parameters()),
    )
