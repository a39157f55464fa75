"""Insertion: replace blocks of a built mmdet detector by experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from damex.models.context import RoutingContext
from damex.models.denoising import check_denoising
from damex.models.ffn_insertion import insert_ffns
from damex.models.insertion_plan import read_plan
from damex.models.insertion_report import InsertionReport
from damex.models.moe_ffn import MoEFFN
from damex.models.moe_patch_conv import MoEPatchConv
from damex.models.patch_insertion import insert_patch_convs, uses_patches
from damex.moe import (
    DenseSoftmaxGate,
    ExpertChoiceGate,
    LoadBalanceLoss,
    MoELayer,
    RoutingLoss,
)

__all__ = ["insert_moe", "moe_blocks"]


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
            in :mod:`damex.models.router_stage`. It is not changed.
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
    if not isinstance(loss, LoadBalanceLoss) or loss.scores != "probability":
        return False
    if isinstance(moe.gate, ExpertChoiceGate):  # uneven on a part of the tokens
        return loss.tokens == "all"
    return isinstance(moe.gate, DenseSoftmaxGate)
