"""Fine-grained experts cut from one dense FFN, initially equal to it.

Axes: D model width, H hidden width of the dense FFN, E experts = copies x parts, S
hidden units that all copies share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from damex.moe.experts import FFNExperts, SharedExpert
from damex.moe.routers import LinearRouter


def split_hidden_dims(hidden_dims: int, *, parts: int) -> int:
    """Hidden width of each part of an FFN, ceil(H / parts).

    Raises ValueError if `parts` is not in [1, H].
    """
    if not 1 <= parts <= hidden_dims:
        raise ValueError(
            f"split_hidden_dims: parts must lie in [1, H={hidden_dims}], got {parts}"
        )
    return -(-hidden_dims // parts)


def shared_hidden_dims(hidden_dims: int, *, parts: int, shared: int) -> int:
    """S, the hidden units of the first `shared` parts of an FFN.

    The other H - S units belong to routed experts. Raises ValueError if `parts` is not
    in [1, H] or `shared` not in [0, parts).
    """
    split_hidden_dims(hidden_dims, parts=parts)
    if not 0 <= shared < parts:
        raise ValueError(
            f"shared_hidden_dims: shared must lie in [0, parts={parts}), as one part "
            f"or more is routed, got {shared}"
        )
    smallest, over = divmod(hidden_dims, parts)  # the first parts are one larger
    return shared * smallest + min(shared, over)


@torch.no_grad()
def load_dense_split(
    experts: FFNExperts,
    w1_HD: Tensor,
    b1_H: Tensor,
    w2_DH: Tensor,
    b2_D: Tensor,
    *,
    parts: int,
    slope_1: Tensor | None = None,
) -> None:
    """Cut a dense FFN along its hidden axis and load the parts into experts.

    Experts c*parts to (c+1)*parts - 1 are copy c of the FFN: part j has its share of
    the hidden units and b2 / parts, so the outputs of one copy add up to that of the
    FFN (Dynamic-DINO, ICCV 2025, arXiv 2507.17436). If `parts` does not divide H, the
    later parts have one extra hidden unit: its first layer stays random and its second
    is zero, so it is silent at first and can learn.

    The mixture equals the FFN with `repeat_router_rows` and `TopKGate(k=parts,
    renormalize=True, weight_scale=parts)`: the k parts of one copy tie, are chosen
    together and have weight 1 each. Dropout must be 0. Weights are those of two
    `nn.Linear`; `slope_1`, of the `nn.PReLU` in between, is for 'prelu' experts. Raises
    ValueError if sizes do not match, or a slope is missing or not used.
    """
    hidden_dims, embed_dims = w1_HD.shape
    width = split_hidden_dims(hidden_dims, parts=parts)
    if (experts.embed_dims, experts.hidden_dims) != (embed_dims, width):
        raise ValueError(
            f"load_dense_split: an FFN {embed_dims}-{hidden_dims}-{embed_dims} in "
            f"{parts} parts needs experts with D={embed_dims} and H={width}, got "
            f"D={experts.embed_dims} and H={experts.hidden_dims}"
        )
    _check_divides("load_dense_split", parts, experts.num_experts)
    if (slope_1 is None) != (experts.slope_E1 is None):
        raise ValueError(
            f"load_dense_split: experts with activation {experts.activation!r} "
            f"{'have no' if experts.slope_E1 is None else 'need a'} slope_1"
        )
    experts.w2_EHD.zero_()
    cuts = (
        w1_HD.tensor_split(parts),
        b1_H.tensor_split(parts),
        w2_DH.t().tensor_split(parts),
    )
    for part, (w1_hD, b1_h, w2_hD) in enumerate(zip(*cuts, strict=True)):
        units = len(b1_h)
        experts.w1_EDH[part::parts, :, :units] = w1_hD.t()
        experts.b1_EH[part::parts, :units] = b1_h
        experts.w2_EHD[part::parts, :units] = w2_hD
    experts.b2_ED.copy_(b2_D / parts)
    if experts.slope_E1 is not None and slope_1 is not None:
        experts.slope_E1.copy_(slope_1.expand_as(experts.slope_E1))


def load_shared_split(
    shared_expert: SharedExpert,
    experts: FFNExperts,
    w1_HD: Tensor,
    b1_H: Tensor,
    w2_DH: Tensor,
    b2_D: Tensor,
    *,
    parts: int,
    slope_1: Tensor | None = None,
) -> None:
    """Cut a dense FFN into a shared expert and routed ones, and load both.

    The shared expert (DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066) takes the first S
    hidden units, its hidden width, and the second bias; `load_dense_split` cuts the
    rest, with the same arguments, gate and errors.
    """
    units = shared_expert.expert.hidden_dims
    first = (w1_HD[:units], b1_H[:units], w2_DH[:, :units], b2_D)
    rest = (w1_HD[units:], b1_H[units:], w2_DH[:, units:], torch.zeros_like(b2_D))
    load_dense_split(shared_expert.expert, *first, parts=1, slope_1=slope_1)
    load_dense_split(experts, *rest, parts=parts, slope_1=slope_1)


@torch.no_grad()
def repeat_router_rows(router: LinearRouter, *, parts: int) -> None:
    """Copy the router row of the first part to all parts of a copy, so that they tie.

    Raises ValueError if `parts`, per copy, does not divide the number of experts.
    """
    _check_divides("repeat_router_rows", parts, router.num_experts)
    for parameter in router.parameters():
        parameter.copy_(parameter[::parts].repeat_interleave(parts, dim=0))


def _check_divides(owner: str, parts: int, num_experts: int) -> None:
    if parts < 1 or num_experts % parts:
        raise ValueError(
            f"{owner}: the number of experts must be a multiple of parts, got "
            f"{num_experts} experts and {parts} parts"
        )
