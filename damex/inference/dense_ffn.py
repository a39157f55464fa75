"""One FFN that equals a mixture of experts for a known dataset.

Axes: D model width, H hidden width, L rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.upcycling import DENSE_EXPERT
from damex.moe import FFNExperts, LowRankExperts, TopKGate

SLOPE = "0.1.weight"  # of nn.PReLU
ODD_PARTS = ("relu", "gelu", "silu")  # activations f with f(z) - f(-z) = z


def dense_ffn(block: MoEFFN, group: int) -> dict[str, Tensor]:
    """Tensors of mmcv's ``FFN.layers`` that equal a block for one dataset group.

    They hold the group's expert, its gate weight folded into the second layer, and the
    shared expert (another FFN or a low-rank linear map), concatenated along the hidden
    units. The block must be in eval mode.

    Raises:
        ConfigError: If no FFN equals the block.
    """
    expert, weight = chosen_expert(block, group)
    moe = block.moe
    if block.norm is not None:
        raise _refusal(block, "it has a norm before its experts (block.norm='pre')")
    if isinstance(moe.experts, LowRankExperts):
        parts = [_linear_part(block, moe.experts, expert, weight)]
    else:
        parts = [_ffn_part(block, moe.experts, expert, weight)]
    if moe.shared_expert is not None:
        parts.insert(0, _ffn_part(block, moe.shared_expert.expert, 0, 1.0))
    slope = parts[-1].pop(SLOPE, None)
    if slope is not None and len(parts) > 1:
        raise _refusal(block, "its shared expert has a slope (PReLU) of its own")
    found = {
        "0.0.weight": torch.cat([part["0.0.weight"] for part in parts]),
        "0.0.bias": torch.cat([part["0.0.bias"] for part in parts]),
        "1.weight": torch.cat([part["1.weight"] for part in parts], dim=1),
        "1.bias": torch.stack([part["1.bias"] for part in parts]).sum(0),
    }
    return found if slope is None else {**found, SLOPE: slope}


def widened(ffn: Mapping[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """Pad the output of `dense_ffn` to ``hidden`` units; the new ones add nothing."""
    more = hidden - ffn["0.0.bias"].shape[0]
    return {
        **ffn,
        "0.0.weight": functional.pad(ffn["0.0.weight"], (0, 0, 0, more)),
        "0.0.bias": functional.pad(ffn["0.0.bias"], (0, more)),
        "1.weight": functional.pad(ffn["1.weight"], (0, more)),
    }


def chosen_expert(block: MoEFFN, group: int) -> tuple[int, float]:
    """The expert that takes all tokens of a group, and its gate weight in eval mode.

    Raises:
        ConfigError: If there are several, or the weight depends on the token.
    """
    if block.is_dense:
        return DENSE_EXPERT, 1.0
    moe = block.moe
    gate, groups_GE = moe.gate, moe.group_experts_GE
    if not isinstance(gate, TopKGate):
        raise _refusal(block, f"its gate is a {type(gate).__name__}, not a TopKGate")
    if gate.k != 1:
        raise _refusal(block, f"a token goes to {gate.k} experts (gate.k)")
    if gate.capacity is not None:
        raise _refusal(block, "its gate has a capacity, which drops tokens")
    if not gate.renormalize and moe.num_experts > 1:
        reason = "the weight of an expert depends on the token (gate.renormalize=False)"
        raise _refusal(block, reason)
    if groups_GE is None:
        raise _refusal(block, "it does not know which experts are whose")
    experts = groups_GE[group].nonzero().flatten().tolist()
    if len(experts) != 1:
        reason = f"the dataset has {len(experts)} experts, of which tokens choose"
        raise _refusal(block, reason)
    return experts[0], float(gate.weight_scale)


def _ffn_part(
    block: MoEFFN, bank: Any, expert: int, weight: float
) -> dict[str, Tensor]:
    """One expert as mmcv's FFN, its output multiplied by ``weight``."""
    if not isinstance(bank, FFNExperts):
        raise _refusal(block, f"its experts are {type(bank).__name__}")
    if bank.activation != block.dense_activation:
        raise _refusal(
            block,
            f"its experts have {bank.activation} and the detector's FFNs "
            f"{block.dense_activation}",
        )
    found = {
        "0.0.weight": bank.w1_EDH[expert].t(),
        "0.0.bias": bank.b1_EH[expert],
        "1.weight": bank.w2_EHD[expert].t() * weight,
        "1.bias": bank.b2_ED[expert] * weight,
    }
    if bank.slope_E1 is not None:
        found[SLOPE] = bank.slope_E1[expert]
    return {name: tensor.detach() for name, tensor in found.items()}


def _linear_part(
    block: MoEFFN, bank: LowRankExperts, expert: int, weight: float
) -> dict[str, Tensor]:
    """A linear map of rank L as 2 L hidden units, by z = f(z) - f(-z)."""
    if block.dense_activation not in ODD_PARTS:
        raise _refusal(
            block,
            f"its {type(bank).__name__} are linear, which FFNs with "
            f"{block.dense_activation} cannot be",
        )
    down_LD = bank.down_EDL[expert].detach().t()
    up_DL = bank.up_ELD[expert].detach().t() * weight
    return {
        "0.0.weight": torch.cat([down_LD, -down_LD]),
        "0.0.bias": down_LD.new_zeros(2 * len(down_LD)),
        "1.weight": torch.cat([up_DL, -up_DL], dim=1),
        "1.bias": up_DL.new_zeros(len(up_DL)),
    }


def _refusal(block: MoEFFN, reason: str) -> ConfigError:
    return ConfigError(
        f"no dense detector equals this mixture of experts: in {block.name}, {reason}. "
        "One expert per dataset, k=1 and renormalize=True, as in damex_best, can be "
        "exported."
    )
