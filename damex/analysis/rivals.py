"""Baselines of the benchmark: layers of the same active size as an MoE layer.

Axes: B images, N tokens per image, V real tokens of the batch, D channels, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from damex.moe import (
    FFNExperts,
    LinearRouter,
    LowRankExperts,
    MoELayer,
    Packing,
    SharedExpert,
    TopKGate,
)


@dataclass(frozen=True)
class Rival:
    """A layer in the benchmark.

    Attributes:
        name: Column label.
        module: The layer.
        forward: Tokens of shape (B, N, D) and their packing -> the same shape.
    """

    name: str
    module: nn.Module
    forward: Callable[[Tensor, Packing], Tensor]


def rivals_of(
    num_experts: int, k: int, *, embed_dims: int, hidden_dims: int
) -> list[Rival]:
    """Return all layers that do the same work, the dense FFN first.

    Routers score an expert by one channel of the token, so that the tokens determine
    the routing. Layers of transformers are included if it is installed. `hidden_dims`
    are those of one expert; the dense FFN has k times as many.
    """
    sizes = (num_experts, embed_dims, hidden_dims)
    layer = _layer(FFNExperts(*sizes), k)
    looped = _layer(FFNExperts(*sizes), k)
    widen = nn.Linear(embed_dims, k * hidden_dims)
    narrow = nn.Linear(k * hidden_dims, embed_dims)
    rivals = [
        _plain("dense FFN", nn.Sequential(widen, nn.ReLU(), narrow)),
        _routed("damex: FFN per expert", layer),
        Rival("a loop over experts", looped, _looped(looped)),
    ]
    if k == 1:
        maps = LowRankExperts(num_experts, embed_dims)
        shared = SharedExpert(embed_dims, hidden_dims)
        recipe = _routed("damex: shared FFN, low-rank maps", _layer(maps, k, shared))
        rivals.insert(2, recipe)
    return rivals + _of_transformers(*sizes, k)


def loop_over_experts(layer: MoELayer, tokens_VD: Tensor) -> Tensor:
    """Reference output of a layer with FFN experts, linear router and top-k gate."""
    experts: Any = layer.experts
    gate: Any = layer.gate
    logits_VE = layer.router(tokens_VD)
    best, chosen = logits_VE.softmax(-1).topk(gate.k, dim=-1)
    best = best / best.sum(-1, keepdim=True)
    out_VD = torch.zeros_like(tokens_VD)
    for expert in range(layer.num_experts):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        hidden = tokens_VD[rows] @ experts.w1_EDH[expert] + experts.b1_EH[expert]
        answer = hidden.relu() @ experts.w2_EHD[expert] + experts.b2_ED[expert]
        out_VD = out_VD.index_add(0, rows, best[rows, place, None] * answer)
    return out_VD


def _layer(experts: Any, k: int, shared: SharedExpert | None = None) -> MoELayer:
    router = LinearRouter(experts.embed_dims, experts.num_experts)
    _point_at_channels(router.weight_ED)
    gate = TopKGate(k=k, renormalize=True)
    return MoELayer(router=router, gate=gate, experts=experts, shared_expert=shared)


def _point_at_channels(weight_ED: Tensor) -> None:
    """Make row e of a router read channel e alone."""
    with torch.no_grad():
        weight_ED.copy_(torch.eye(*weight_ED.shape))


def _plain(name: str, module: nn.Module) -> Rival:
    """A module that ignores padding."""
    return Rival(name, module, lambda tokens_BND, packing: module(tokens_BND))


def _routed(name: str, layer: MoELayer) -> Rival:
    return Rival(
        name, layer, lambda tokens_BND, packing: layer(tokens_BND, packing=packing)[0]
    )


def _looped(layer: MoELayer) -> Callable[[Tensor, Packing], Tensor]:
    def forward(tokens_BND: Tensor, packing: Packing) -> Tensor:
        return packing.unpack(loop_over_experts(layer, packing.pack(tokens_BND)))

    return forward


def _of_transformers(
    num_experts: int, embed_dims: int, hidden_dims: int, k: int
) -> list[Rival]:
    """Mixtral's layer, which ignores padding.

    Its gated experts have three matrices, so the width is two thirds.
    """
    if find_spec("transformers") is None:
        return []
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    rivals = []
    for backend in ("eager", "grouped_mm"):
        config = MixtralConfig(
            hidden_size=embed_dims,
            intermediate_size=round(hidden_dims / 12) * 8,  # rows of whole 16 bytes
            num_local_experts=num_experts,
            num_experts_per_tok=k,
            experts_implementation=backend,
        )
        block = MixtralSparseMoeBlock(config)
        for parameter in block.experts.parameters():
            nn.init.normal_(parameter, std=0.02)
        _point_at_channels(block.gate.weight)
        rivals.append(_plain(f"transformers: Mixtral, {backend}", block))
    return rivals
