"""Experts in the place of the feed-forward blocks of transformer layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmcv.cnn.bricks.transformer import FFN
from torch import nn

from damex.errors import ConfigError
from damex.models.block_options import take_closing_norm
from damex.models.fine_grained import SplitStart
from damex.models.insertion_plan import InsertionPlan, layers_of
from damex.models.insertion_report import InsertedLayer, count_parameters
from damex.models.layer_choice import chosen_layers
from damex.models.moe_ffn import MoEFFN
from damex.models.part_building import assemble_layer, build_part
from damex.moe import MoELayer

__all__ = ["insert_ffns"]


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
