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
DENSE_EXPERT = 0  # acts as the FFN in a dense phase
FLAG = "dense_phase.flag"  # in the state dict of a block


class DensePhase(nn.Module):
    """Whether a block is still a dense FFN; a buffer, as checkpoints must store it.

    Attributes:
        is_open: The flag on the host, as reading the buffer would synchronize a GPU.
    """

    flag: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(True))
        self.is_open = True

    def close(self) -> None:
        """End the dense phase for good."""
        self.flag.fill_(False)
        self.is_open = False

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.is_open = bool(self.flag)


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

    def load(self, moe: Any, dense: Sequence[Tensor]) -> None:
        """Cut an FFN into the experts, and tie the router's rows, in place.

        ``dense`` is as in `damex.moe.load_dense_split`; for PReLU the slope follows.

        Raises:
            ValueError: If the FFN has another width.
        """
        load: Callable[..., None] = load_dense_split
        if moe.shared_expert is not None:
            load = partial(load_shared_split, moe.shared_expert)
        slope_1 = dense[4] if len(dense) > 4 else None
        load(moe.experts, *dense[:4], parts=self.parts, slope_1=slope_1)
        if self.parts > 1:  # copies of a single part have nothing to tie
            repeat_router_rows(moe.router, parts=self.parts)


def upcycle(block: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Pre-load hook: convert the FFN in a state dict to the experts of a MoEFFN.

    Tensors that do not fit are left for the loader to report. Experts with a dense
    phase are loaded into a block without one, and vice versa.
    """
    own = block.state_dict()
    found = expert_tensors(block, state, prefix)
    if found is not None:
        for key in dense_keys(own, prefix).values():
            del state[key]
        for name, tensor in own.items():  # missing in a dense checkpoint
            state.setdefault(prefix + name, tensor)
        state.update({prefix + name: tensor for name, tensor in found.items()})
        return
    experts = [key for key in state if key.startswith(prefix + ROUTED)]
    if is_unfinished(block, state, prefix):
        for key in experts:
            state[key] = state[key][DENSE_EXPERT].expand_as(state[key]).clone()
    if block.dense_phase is None:
        state.pop(prefix + FLAG, None)
    elif experts:
        state.setdefault(prefix + FLAG, torch.tensor(False))


def is_unfinished(block: Any, state: Mapping[str, Any], prefix: str) -> bool:
    """Whether only one expert of a state dict is trained, but the block needs all."""
    return block.dense_phase is None and bool(state.get(prefix + FLAG, False))


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


def expert_tensors(
    block: Any, state: Mapping[str, Any], prefix: str
) -> dict[str, Any] | None:
    """Return the tensors of a block's experts made of an FFN in a state dict.

    None if the state dict has no FFN, or it does not fit.
    """
    own, moe = block.state_dict(), block.moe
    keys = dense_keys(own, prefix)
    if not all(key in state for key in keys.values()):
        return None
    dense = {name: state[key] for name, key in keys.items()}
    if block.split is not None:
        other = copy.deepcopy(moe)
        try:
            block.split.load(other, [*dense.values()])
        except ValueError:
            return None
        parts = ("experts.", "shared_expert.", "router.")
        tensors = other.state_dict().items()
        return {f"moe.{name}": t for name, t in tensors if name.startswith(parts)}
    routed = _one_for_each(own, dense, ROUTED)
    if moe.shared_expert is None:
        return routed if len(routed) == len(dense) else None
    shared = _one_for_each(own, dense, SHARED)
    outputs = getattr(moe.experts, "output_names", None)
    if outputs is None or len(shared) < len(dense):
        return None
    muted = {ROUTED + name: torch.zeros_like(own[ROUTED + name]) for name in outputs}
    return shared | routed | muted


def _one_for_each(
    own: Mapping[str, Any], dense: Mapping[str, Any], bank: str
) -> dict[str, Any]:
    """Copy the tensors of an FFN to each expert of a bank, if shapes agree."""
    found = {}
    for name, tensor in dense.items():
        target = own.get(bank + name)
        value = tensor.t() if name.startswith("w") else tensor
        if target is not None and value.shape == target.shape[1:]:
            found[bank + name] = value.expand_as(target).clone()
    return found


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


def slice_channels(
    block: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Pre-load hook: convert the kernel of a dense convolution to the experts'."""
    key, own = f"{prefix}weight", block.state_dict()
    target = own["moe.experts.weight_EOCKK"]
    kernel = state.get(key)
    if kernel is None or kernel.shape != target.flatten(0, 1).shape:
        return  # the loader reports the keys that do not fit
    del state[key]
    own["moe.experts.weight_EOCKK"] = kernel.reshape(target.shape)
    state.update({prefix + name: tensor for name, tensor in own.items()})


def load_closing_norm(
    layer: Any, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Pre-load hook: load an untouched layer's closing norm into the block's own.

    It is the best available start, though not an equal one, as it now precedes the
    experts.
    """
    closing = closing_norm(layer, prefix)
    for key in [key for key in state if key.startswith(closing)]:
        state.setdefault(
            f"{prefix}ffn.norm.{key.removeprefix(closing)}", state.pop(key)
        )


def closing_norm(layer: Any, prefix: str) -> str:
    """Return the key prefix of the closing norm of an untouched layer."""
    return f"{prefix}norms.{len(layer.norms) - 1}."
