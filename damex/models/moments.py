"""Optimizer moments of a detector whose experts start from an earlier detector.

Optimizers keep tensors of a parameter's shape, such as Adam's two moments. Where
experts start as a dense FFN they follow its weights (Komatsuzaki et al. 2023, arXiv
2212.05055, appendix B.6: vision models start better with them).

Axes: D model width, H hidden width of the FFN, h of a part of it, P parts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from damex.models.blocks import MoEFFN, MoEPatchConv
from damex.models.dense_phase import DENSE_EXPERT
from damex.models.upcycling import (
    ROUTED,
    SHARED,
    closing_norm,
    dense_keys,
    expert_tensors,
    is_unfinished,
)


def _unchanged(moment: Tensor, is_second: bool) -> Tensor:
    return moment


@dataclass(frozen=True)
class Origin:
    """Where a parameter's moments come from.

    Attributes:
        source: Name of the earlier parameter.
        convert: Maps its moment to that of this parameter; the flag is True for a
            moment of squared gradients.
    """

    source: str
    convert: Callable[[Tensor, bool], Tensor] = _unchanged


def moment_origins(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Origin]:
    """Find the origin of every parameter of a detector, by name.

    Most are a parameter of the same name, which need not exist in ``state``, the state
    dict of the earlier detector.
    """
    found = {name: Origin(name) for name, _ in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, MoEFFN):
            found |= _expert_origins(module, f"{name}.", state)
            if module.norm is not None:
                parent = name.rpartition(".")[0]
                closing = closing_norm(model.get_submodule(parent), f"{parent}.")
                for own, _ in module.norm.named_parameters():
                    if closing + own in state:
                        found[f"{name}.norm.{own}"] = Origin(closing + own)
        elif isinstance(module, MoEPatchConv) and f"{name}.weight" in state:
            sliced = f"{name}.moe.experts.weight_EOCKK"
            shape = model.get_parameter(sliced).shape
            found[sliced] = Origin(f"{name}.weight", partial(_slices, shape=shape))
    return found


def _expert_origins(
    block: MoEFFN, prefix: str, state: Mapping[str, Tensor]
) -> dict[str, Origin]:
    own = dict(block.named_parameters())
    if is_unfinished(block, state, prefix):
        names = [prefix + name for name in own if name.startswith(ROUTED)]
        return {name: Origin(name, _copies_of_one) for name in names}
    tensors = expert_tensors(block, state, prefix)
    if tensors is None:
        return {}
    found = {}
    for name, key in dense_keys(block.state_dict(), prefix).items():
        for bank in (ROUTED, SHARED):
            # Missing: no shared expert, no such FFN tensor, or an untrained bias.
            if bank + name in tensors and bank + name in own:
                convert = partial(
                    _of_experts, name=name, cut=_cut_of(block, bank, name)
                )
                found[f"{prefix}{bank}{name}"] = Origin(key, convert)
    return found


@dataclass(frozen=True)
class _Cut:
    """Which part of an FFN the experts of a bank are."""

    units: slice  # their hidden units
    parts: int  # number of parts that these are cut into
    copies: int  # experts with each part
    is_muted: bool  # whether the tensor starts at zero


def _cut_of(block: MoEFFN, bank: str, name: str) -> _Cut:
    moe, units, parts = block.moe, slice(None), 1
    shared = moe.shared_expert
    if bank == SHARED:
        if shared is not None and block.split is not None:
            units = slice(shared.expert.hidden_dims)
        return _Cut(units, parts, copies=1, is_muted=False)
    zeros = getattr(moe.experts, "output_names", ())
    if block.split is not None:
        parts = block.split.parts
        if shared is not None:
            units = slice(shared.expert.hidden_dims, None)
        zeros = ("b2_ED",)  # the shared expert holds all of it
    return _Cut(
        units,
        parts,
        copies=moe.num_experts // parts,
        is_muted=shared is not None and name in zeros,
    )


def _of_experts(moment: Tensor, is_second: bool, *, name: str, cut: _Cut) -> Tensor:
    """Expand a moment of an FFN's tensor to all experts of a bank."""
    if name in ("b2_ED", "slope_E1"):  # parts see the gradient of the whole
        parts_P = moment.expand(cut.parts, -1)
    else:
        moment_H = moment.t() if name == "w2_EHD" else moment
        parts_P = _in_parts(moment_H[cut.units], cut.parts, is_second)
        parts_P = parts_P.transpose(1, 2) if name == "w1_EDH" else parts_P
    moment_E = parts_P.repeat(cut.copies, *[1] * (parts_P.dim() - 1))
    # Tensors that start at zero have no direction yet, but will see gradients as large
    # as the FFN's: without its second moment Adam's first steps would be too long.
    return torch.zeros_like(moment_E) if cut.is_muted and not is_second else moment_E


def _in_parts(moment_H: Tensor, parts: int, is_second: bool) -> Tensor:
    """Split along the hidden axis, (P, h, ...); padding copies second moments only."""
    cuts = moment_H.tensor_split(parts)
    width = len(cuts[0])
    filled = [
        cut
        if len(cut) == width
        else torch.cat([cut, cut[-1:] if is_second else torch.zeros_like(cut[-1:])])
        for cut in cuts
    ]
    return torch.stack(filled)


def _copies_of_one(moment_E: Tensor, is_second: bool) -> Tensor:
    return moment_E[DENSE_EXPERT].expand_as(moment_E).clone()


def _slices(moment: Tensor, is_second: bool, *, shape: Any) -> Tensor:
    """Slice the moment of a kernel; one of another size is left for the caller."""
    fits = moment.shape == (shape[0] * shape[1], *shape[2:])
    return moment.reshape(shape) if fits else moment
