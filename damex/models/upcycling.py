"""Sparse upcycling: experts that start as the FFNs of a dense checkpoint.

Komatsuzaki et al. 2023, arXiv 2212.05055. Routers keep their weights. A shared expert
becomes the FFN, and routed experts add nothing at first (FFNs are copies of it except
for zero second layers), so the block equals the FFN for any gate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from damex.models.dense_phase import DENSE_EXPERT, FLAG
from damex.moe import (
    FFNExperts,
    MoELayer,
    TopKGate,
    load_dense_split,
    load_shared_split,
    repeat_router_rows,
)

SHARED = "moe.shared_expert.expert."
ROUTED = "moe.experts."


def upcycle(block: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Pre-load hook: convert the FFN in a state dict to the experts of a MoEFFN.

    Tensors that do not fit are left for the loader to report.
    """
    own = block.state_dict()
    keys = dense_keys(own, prefix)
    found = expert_tensors(block, state, prefix)
    if found is None:
        _settle_phase(block, state, prefix)
        return
    for key in keys.values():
        del state[key]
    for name, tensor in own.items():  # missing in a dense checkpoint
        state.setdefault(prefix + name, tensor)
    for name, tensor in found.items():
        state[prefix + name] = tensor


def expert_tensors(
    block: Any, state: Mapping[str, Any], prefix: str
) -> dict[str, Any] | None:
    """Return the tensors of a block's experts made of an FFN in a state dict.

    None if the state dict has no FFN, or it does not fit.
    """
    own = block.state_dict()
    keys = dense_keys(own, prefix)
    if not all(key in state for key in keys.values()):
        return None
    if block.split is not None:
        return _parts(block, [state[key] for key in keys.values()])
    dense = {name: state[key] for name, key in keys.items()}
    return _copies(block.moe, own, dense)


def is_unfinished(block: Any, state: Mapping[str, Any], prefix: str) -> bool:
    """Whether only one expert of a state dict is trained, but the block needs all."""
    return block.dense_phase is None and bool(state.get(prefix + FLAG, False))


def _settle_phase(block: Any, state: dict[str, Any], prefix: str) -> None:
    """Load experts with a dense phase into a block without one, and vice versa."""
    experts = [key for key in state if key.startswith(prefix + ROUTED)]
    if is_unfinished(block, state, prefix):
        for key in experts:
            state[key] = state[key][DENSE_EXPERT].expand_as(state[key]).clone()
    if block.dense_phase is None:
        state.pop(prefix + FLAG, None)
    elif experts:
        state.setdefault(prefix + FLAG, torch.tensor(False))


def upcycling_note(model: nn.Module, state: Mapping[str, Any]) -> str | None:
    """Return a warning if a dense checkpoint would lose much of its FFNs, or None."""
    blocks: list[Any] = [
        module
        for name, module in model.named_modules()
        if f"{name}.layers.0.0.weight" in state and hasattr(module, "moe")
    ]
    notes = gate_notes([block for block in blocks if block.dense_phase is None])
    others = [
        (block.dense_activation, *heir)
        for block in blocks
        if None not in (heir := _heir(block))
        and block.dense_activation not in (None, heir[1])
    ]
    if others:
        old, field, new = others[0]
        notes.append(
            f"the FFNs of {len(others)} layers were trained with {old} and become "
            f"experts with {new}, which answer something else; "
            f"moe.{field}.activation={old!r} keeps what they learned."
        )
    return " ".join(notes) or None


def _heir(block: Any) -> tuple[str, str | None]:
    """Return the ``moe`` field that becomes the FFN, and its activation, if any."""
    moe = block.moe
    if moe.shared_expert is None or block.split is not None:
        return "experts", getattr(moe.experts, "activation", None)
    return "shared_expert", moe.shared_expert.expert.activation


def gate_notes(blocks: Sequence[Any]) -> list[str]:
    """Return a warning, or none, if copies of an FFN together output less than it."""
    weights = [f"1/{block.moe.num_experts}" for block in blocks if _shrinks(block)]
    if not weights:
        return []
    return [
        f"the FFNs of {len(weights)} layers become experts with gate weights near "
        f"{weights[0]}, so these layers answer that much less than in the dense "
        "detector; moe.gate.renormalize=True starts equal to it."
    ]


def _shrinks(block: Any) -> bool:
    """Whether copies of the FFN are weighted by a softmax over all experts."""
    moe = block.moe
    if moe.shared_expert is not None or moe.num_experts == 1:
        return False
    gate = moe.gate
    return (
        isinstance(gate, TopKGate) and not gate.renormalize and gate.weight_scale == 1.0
    )


def dense_keys(own: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Map the names of an expert's tensors to the keys of mmcv's FFN.

    ``own`` is the state dict of a block with experts, ``prefix`` that of the block's
    keys.
    """
    names = {"w1_EDH": "0.0.weight", "b1_EH": "0.0.bias"}
    names |= {"w2_EHD": "1.weight", "b2_ED": "1.bias"}
    if any(f"{bank}slope_E1" in own for bank in (ROUTED, SHARED)):
        names["slope_E1"] = "0.1.weight"  # of nn.PReLU
    return {name: f"{prefix}layers.{key}" for name, key in names.items()}


def _copies(
    moe: MoELayer, own: Mapping[str, Any], dense: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Copy the FFN to every expert, or to the shared one; None if it does not fit."""
    outputs = getattr(moe.experts, "output_names", None)
    routed = _one_for_each(own, dense, ROUTED)
    if moe.shared_expert is None:
        return routed if routed.keys() == {ROUTED + name for name in dense} else None
    shared = _one_for_each(own, dense, SHARED)
    if outputs is None or shared.keys() != {SHARED + name for name in dense}:
        return None
    muted = {ROUTED + name: torch.zeros_like(own[ROUTED + name]) for name in outputs}
    return shared | routed | muted


def _one_for_each(
    own: Mapping[str, Any], dense: Mapping[str, Any], bank: str
) -> dict[str, Any]:
    """Copy the tensors of an FFN to each expert of a bank, where shapes agree."""
    found = {}
    for name, tensor in dense.items():
        target = own.get(bank + name)
        value = tensor.t() if name.startswith("w") else tensor
        if target is not None and value.shape == target.shape[1:]:
            found[bank + name] = value.expand_as(target).clone()
    return found


def _parts(block: Any, tensors: list[Any]) -> dict[str, Any] | None:
    """Return the parts of the FFN; None if it has another width."""
    try:
        found = block.split.state(block.moe, tensors)
    except ValueError:
        return None
    return {f"moe.{name}": tensor for name, tensor in found.items()}


@dataclass(frozen=True, kw_only=True)
class SplitStart:
    """Initialization of fine-grained experts as the parts of one dense FFN.

    A shared expert is one of the parts; the others are cut from the rest.
    ``hidden_dims`` is the FFN's width before the cut, ``parts`` the number of routed
    pieces.
    """

    parts: int
    hidden_dims: int

    def draw(self, moe: MoELayer) -> None:
        """Draw a dense FFN and cut it into the experts, in place."""
        experts: Any = moe.experts
        dense = FFNExperts(
            1,
            experts.embed_dims,
            self.hidden_dims,
            activation=experts.activation,
            init_std=experts.init_std,
            output_bias=experts.output_bias,
        ).to(experts.w1_EDH.device)
        w1_HD, w2_DH = dense.w1_EDH[0].t(), dense.w2_EHD[0].t()
        slope = () if dense.slope_E1 is None else (dense.slope_E1[0],)
        self.load(moe, (w1_HD, dense.b1_EH[0], w2_DH, dense.b2_ED[0], *slope))

    def state(self, moe: MoELayer, dense: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return a state of the experts and the router that equals a dense FFN.

        The router decides which copy gets which token. ``dense`` is as in
        `damex.moe.load_dense_split`, for PReLU followed by the slope.

        Raises:
            ValueError: If the FFN has another width.
        """
        other = copy.deepcopy(moe)
        self.load(other, dense)
        return {
            name: tensor
            for name, tensor in other.state_dict().items()
            if name.startswith(("experts.", "shared_expert.", "router."))
        }

    def load(self, moe: Any, dense: Sequence[Tensor]) -> None:
        """Cut an FFN into the experts, and tie the router's rows, in place.

        Raises:
            ValueError: If the FFN has another width.
        """
        load: Callable[..., None] = load_dense_split
        shared = moe.shared_expert
        if shared is not None:
            load = partial(load_shared_split, shared)
        slope_1 = dense[4] if len(dense) > 4 else None
        load(moe.experts, *dense[:4], parts=self.parts, slope_1=slope_1)
        if self.parts > 1:  # copies of a single part have nothing to tie
            repeat_router_rows(moe.router, parts=self.parts)


def slice_channels(
    block: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Pre-load hook: convert the kernel of a dense convolution to the experts'."""
    del rest
    key, own = f"{prefix}weight", block.state_dict()
    target = own["moe.experts.weight_EOCKK"]
    kernel = state.get(key)
    if kernel is None or kernel.shape != target.flatten(0, 1).shape:
        return  # the loader reports the keys that do not fit
    del state[key]
    for name, tensor in own.items():
        state[prefix + name] = tensor
    state[f"{prefix}moe.experts.weight_EOCKK"] = kernel.reshape(target.shape)


def closing_norm_becomes_own(
    layer: Any, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Pre-load hook: load an untouched layer's closing norm into the block's own.

    It is the best available start, though not an equal one, as it now precedes the
    experts.
    """
    del rest
    closing = closing_norm(layer, prefix)
    for key in [key for key in state if key.startswith(closing)]:
        own = f"{prefix}ffn.norm.{key.removeprefix(closing)}"
        state.setdefault(own, state[key])
        del state[key]


def closing_norm(layer: Any, prefix: str) -> str:
    """Return the key prefix of the closing norm of an untouched layer."""
    return f"{prefix}norms.{len(layer.norms) - 1}."
