"""Replace blocks of a built mmdet detector by experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.detectors import DeformableDETR
from torch import nn

from damex.errors import ConfigError
from damex.models.blocks import MoEBlock, MoEFFN, activation_of
from damex.models.build import build_layer, module_class
from damex.models.config import MoEConfig
from damex.models.context import RoutingContext
from damex.models.expert_parallel import shard_experts
from damex.models.sites import chosen_layers
from damex.models.starts import (
    DensePhase,
    SplitStart,
    cut_hidden_dims,
    load_closing_norm,
)
from damex.moe import (
    HierarchicalRouter,
    LoadBalanceLoss,
    MoELayer,
    RouterZLoss,
    TopKGate,
)

# The modules of source papers register what only they need: functions that insert other
# experts than FFNs, and builders of what a field of `moe` asks for.
Inserter = Callable[..., Iterator[str]]
INSERTERS: dict[type, Inserter] = {}
EXTENSIONS: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class InsertionReport:
    """Every replaced block, in the order of computation.

    Attributes:
        rows: A line on each block: its name, the dense module, numbers of parameters.
        notes: Warnings about settings that work but are probably unintended.
        layout: Which process has which experts; empty if each has all.
        title: The first line; by default it counts layers with experts.
    """

    rows: tuple[str, ...]
    notes: tuple[str, ...] = ()
    layout: str = ""
    title: str = ""

    def __str__(self) -> str:
        rows = (*self.rows, self.layout) if self.layout else self.rows
        title = self.title or f"experts in {len(self.rows)} layers:"
        return "\n  ".join([title, *rows])


def insert_moe(
    detector: nn.Module,
    config: MoEConfig,
    *,
    context: RoutingContext,
    num_groups: int | None,
) -> InsertionReport:
    """Replace the FFNs of chosen transformer layers by MoE blocks.

    Experts in ``INSERTERS`` replace other modules. ``num_groups`` is None outside of a
    mixture.

    Raises:
        ConfigError: If a layer does not exist or has no FFN, a module cannot be built
            or needs groups that outnumber the experts, denoising queries would compete
            with others, or experts cannot be sharded as configured.
    """
    insert = _inserter(config)
    rows = tuple(insert(detector, config, context=context, num_groups=num_groups))
    blocks = moe_blocks(detector)
    _check_blocks(detector, blocks)
    notes = [*layer_notes(blocks[0].moe)]
    if config.upcycling is not None:
        notes += [f"moe.upcycling: {note}" for note in gate_notes(blocks)]
    layout = shard_experts(config, blocks) if config.expert_parallel > 1 else ""
    return InsertionReport(rows, tuple(notes), layout)


def moe_blocks(detector: nn.Module) -> list[MoEBlock]:
    """Return the MoE blocks of a detector in the order of computation."""
    return [m for m in detector.modules() if isinstance(m, MoEBlock)]


def counts_foreground(blocks: Sequence[MoEBlock]) -> bool:
    """Whether any routing loss of the blocks is about foreground tokens."""
    losses = [loss for block in blocks for loss in block.moe.losses]
    return any(loss.tokens == "foreground" for loss in losses)


def _inserter(config: MoEConfig) -> Inserter:
    """Return the function that inserts the configured experts, by default as FFNs."""
    module = module_class(config.experts)
    for kind, inserter in INSERTERS.items():
        if inspect.isclass(module) and issubclass(module, kind):
            return inserter
    if config.layers.backbone is not None:
        raise ConfigError(
            "moe.layers.backbone needs experts that convolve patches; set "
            "moe.experts=dict(type='PatchConvExperts', patch_size=2), got the type "
            f"{config.experts['type']!r}."
        )
    return _insert_ffns


def _insert_ffns(
    detector: nn.Module,
    config: MoEConfig,
    *,
    context: RoutingContext,
    num_groups: int | None,
) -> Iterator[str]:
    """Replace the selected FFNs; yield a line of the report for each."""
    for component, numbers in config.layers.chosen.items():
        for name, layer in chosen_layers(detector, component, numbers):
            dense = layer.ffn
            moe, split = _build_ffn_experts(config, dense, num_groups)
            is_pre = config.block.norm == "pre"
            layer.ffn = block = MoEFFN(
                moe,
                name=name,
                context=context,
                dense=dense,
                with_cp=config.with_cp,
                norm=_take_closing_norm(layer, name) if is_pre else None,
                drop_path=config.block.drop_path,
                split=split,
                dense_phase=None if config.upcycling is None else DensePhase(),
            )
            width = dense.embed_dims
            yield report_row(
                block, dense, f"FFN {width}-{dense.feedforward_channels}-{width}"
            )


def _build_ffn_experts(
    config: MoEConfig, dense: FFN, num_groups: int | None
) -> tuple[MoELayer, SplitStart | None]:
    """Build a MoE layer with the width, activation and dropout of the FFN."""
    fine, width, split = config.fine_grained, dense.feedforward_channels, None
    shared_width = routed_width = width
    if fine is not None:
        split = SplitStart(parts=fine.routed, hidden_dims=width)
        try:
            shared_width, routed_width = cut_hidden_dims(
                width, parts=fine.parts, shared=fine.shared
            )
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


def _take_closing_norm(layer: nn.Module, name: str) -> nn.Module:
    """Take the norm after the feed-forward block out of a transformer layer.

    It is replaced by an identity. Weights of the closing norm in a checkpoint of the
    untouched layer are loaded into the block's own norm.
    """
    norms = getattr(layer, "norms", None)
    if not isinstance(norms, nn.ModuleList) or isinstance(norms[-1], nn.Identity):
        raise ConfigError(
            f"moe.block.norm='pre' needs a norm to move, but layer {name} "
            f"({type(layer).__name__}) has no list 'norms' that ends with one."
        )
    norm = norms[-1]
    norms[-1] = nn.Identity()
    layer.register_load_state_dict_pre_hook(load_closing_norm)
    return norm


def report_row(block: MoEBlock, dense: nn.Module, description: str) -> str:
    """A line of the report: the block, the module before it, numbers of parameters."""
    before, after = (
        sum(p.numel() for p in module.parameters()) for module in (dense, block)
    )
    return (
        f"{block.name}: {description} ({before:,} parameters) -> "
        f"{block.moe.num_experts} experts ({after:,})"
    )


def _check_blocks(detector: nn.Module, blocks: Sequence[MoEBlock]) -> None:
    """Reject gates and losses that do not suit the detector's queries."""
    for block in blocks:
        # DINO's attention mask hides denoising queries, made of the ground truth, but
        # experts that choose among all tokens of an image see both kinds.
        if (
            getattr(detector, "dn_query_generator", None) is not None
            and block.name.startswith("decoder.")
            and block.moe.gate.compares_tokens
        ):
            raise ConfigError(
                f"moe.gate is {type(block.moe.gate).__name__} and moe.layers chooses "
                f"{block.name}, where denoising queries, made of the ground truth, "
                "would compete with the matching queries in training alone; set "
                "moe.layers=dict(encoder='even'), or another gate such as TopKGate, or "
                "use a detector without denoising queries such as MoEDeformableDETR."
            )
    if not counts_foreground(blocks):
        return
    has_queries = all(isinstance(block, MoEFFN) for block in blocks)
    if not has_queries or not isinstance(detector, DeformableDETR):
        place = type(detector).__name__ if has_queries else "the backbone"
        raise ConfigError(
            "moe.losses: tokens='foreground' needs queries with reference points, "
            f"which {place} does not have; set tokens='all', or use layers of the "
            "encoder or decoder of MoEDINO, MoEDDQDETR or MoEDeformableDETR."
        )


def layer_notes(moe: MoELayer) -> Iterator[str]:
    """Warn about losses without an effect, misleading scores and untaught routers."""
    is_taught = any(loss.needs_groups for loss in moe.losses)
    sizes = [] if moe.group_experts_GE is None else moe.group_experts_GE.sum(1).tolist()
    k = getattr(moe.gate, "k", 1)
    if is_taught and sizes and k > min(sizes):
        yield (
            f"moe.gate.k is {k}, but a dataset group has {min(sizes)} of the "
            f"{moe.num_experts} experts: its tokens always reach experts of other "
            f"groups, too, against what moe.losses teaches; set k={min(sizes)}, or "
            f"num_experts={k * len(sizes)} or more."
        )
    if moe.gate.has_constant_weights and not any(x.weight for x in moe.losses):
        yield (
            f"moe.gate: the weights of this {type(moe.gate).__name__} are always 1, "
            "and moe.losses is empty: nothing teaches the router, whose choice stays "
            "that of random weights; add a loss such as dict(type='DatasetRoutingLoss',"
            " weight=0.1), or leave out renormalize (TopKGate) or weights "
            "(ExpertChoiceGate). Several processes need find_unused_parameters=True."
        )
    balance = [loss for loss in moe.losses if isinstance(loss, LoadBalanceLoss)]
    for loss in balance:
        if moe.gate.has_even_load(loss.tokens):
            yield (
                "moe.losses: LoadBalanceLoss cannot teach anything here, as "
                f"{type(moe.gate).__name__} gives each expert the same load: the loss "
                "is always 1; remove it."
            )
    scales_logits = any(isinstance(loss, RouterZLoss) for loss in moe.losses)
    if scales_logits and isinstance(moe.router, HierarchicalRouter):
        yield (
            "moe.losses: RouterZLoss cannot teach anything here, as HierarchicalRouter "
            "gives log probabilities: the loss is always 0; remove it."
        )
    choice = moe.group_choice
    if choice.oracle:
        yield (
            "moe.oracle: in evaluation the dataset of each image chooses its experts; "
            "ALL SCORES ARE AN UPPER BOUND of routing by dataset, and NOT what users "
            "get."
        )
    if choice.teacher_forcing and not is_taught:
        yield (
            "moe.teacher_forcing: nothing teaches the router which dataset a token "
            "comes from, which it has to know in evaluation; add "
            "dict(type='DatasetRoutingLoss', weight=0.1) to moe.losses."
        )
    if choice.teacher_forcing and {*sizes} == {1} and balance:
        yield (
            "moe.losses: with teacher_forcing and one expert per dataset group the "
            "datasets decide the load, which LoadBalanceLoss cannot change: it only "
            "pushes routers away from large datasets; remove it."
        )


def upcycling_note(model: nn.Module, state: Mapping[str, Any]) -> str | None:
    """Return a warning if a dense checkpoint would lose much of its FFNs, or None."""
    blocks: list[Any] = [
        module
        for name, module in model.named_modules()
        if f"{name}.layers.0.0.weight" in state and hasattr(module, "moe")
    ]
    notes = gate_notes([block for block in blocks if block.dense_phase is None])
    others = []
    for block in blocks:
        field, bank = "experts", block.moe.experts
        if block.moe.shared_expert is not None and block.split is None:
            field, bank = "shared_expert", block.moe.shared_expert.expert
        old, new = block.dense_activation, getattr(bank, "activation", None)
        if None not in (old, new) and old != new:
            others.append((old, field, new))
    if others:
        old, field, new = others[0]
        notes.append(
            f"the FFNs of {len(others)} layers were trained with {old} and become "
            f"experts with {new}, whose output differs; "
            f"moe.{field}.activation={old!r} keeps what they learned."
        )
    return " ".join(notes) or None


def gate_notes(blocks: Sequence[Any]) -> list[str]:
    """Return a warning, or none, if copies of an FFN together output less than it.

    They do if a softmax over all experts weights them.
    """
    weights = [
        f"1/{moe.num_experts}"
        for moe in (block.moe for block in blocks)
        if moe.shared_expert is None and moe.num_experts > 1
        if isinstance(moe.gate, TopKGate) and not moe.gate.renormalize
        if moe.gate.weight_scale == 1.0
    ]
    if not weights:
        return []
    return [
        f"the FFNs of {len(weights)} layers become experts with gate weights near "
        f"{weights[0]}, which scale the output of these layers down as much; "
        "moe.gate.renormalize=True starts equal to the dense detector."
    ]
