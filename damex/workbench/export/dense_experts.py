"""Experts without dispatch, for export: their choice is known per dataset or image.

- `dense_ffn`: for a given dataset, one FFN equals a mixture of experts.
- `VotedLayer`: if the tokens of an image vote on one expert (``image_vote``), its
  weights are looked up per image, as ONNX cannot dispatch a variable number of tokens.

Axes: B images, N tokens per image, D model width, H hidden width, L rank, E experts, G
dataset groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.dataset_classifier import classifies_datasets, router_posterior
from damex.models.detectors import RoutedDetector, mmdet_class
from damex.models.insertion import moe_blocks
from damex.models.starts import DENSE_EXPERT
from damex.moe import FFNExperts, LowRankExperts, RoutingRecord, TopKGate
from damex.moe.routing import image_votes

SLOPE = "0.1.weight"  # of nn.PReLU
ODD_PARTS = ("relu", "gelu", "silu")  # activations f with f(z) - f(-z) = z


def reject(
    detector: RoutedDetector, path: str, problems: Mapping[str, Any], reason: str
) -> None:
    """Raise a ConfigError if a detector has a problem, or experts other than FFNs."""
    blocks = moe_blocks(detector)
    shared = {
        "moe.channels": detector.channel_gating,
        "experts in its backbone": any(not isinstance(b, MoEFFN) for b in blocks),
    }
    for what, found in {**problems, **shared}.items():
        if found:
            raise ConfigError(f"the detector in {path} has {what}, {reason}.")


def dense_ffn(block: MoEFFN, group: int) -> dict[str, Tensor]:
    """Tensors of mmcv's ``FFN.layers`` that equal a block for one dataset group.

    They hold the group's expert, its gate weight folded into the second layer, and the
    shared expert (another FFN or a low-rank linear map), concatenated along the hidden
    units. The block must be in eval mode. ConfigError if no FFN equals the block.
    """
    expert, weight = chosen_expert(block, group)
    moe = block.moe
    if block.norm is not None:
        raise _unsupported(block, "it has a norm before its experts (block.norm='pre')")
    if isinstance(moe.experts, LowRankExperts):
        parts = [_linear_part(block, group)]
    else:
        parts = [_ffn_part(block, moe.experts, expert, weight)]
    if moe.shared_expert is not None:
        parts.insert(0, _ffn_part(block, moe.shared_expert.expert, 0, 1.0))
    slope = parts[-1].pop(SLOPE, None)
    if slope is not None and len(parts) > 1:
        raise _unsupported(block, "its shared expert has another slope (PReLU)")
    found = {
        "0.0.weight": torch.cat([part["0.0.weight"] for part in parts]),
        "0.0.bias": torch.cat([part["0.0.bias"] for part in parts]),
        "1.weight": torch.cat([part["1.weight"] for part in parts], dim=1),
        "1.bias": torch.stack([part["1.bias"] for part in parts]).sum(0),
    }
    return found if slope is None else {**found, SLOPE: slope}


def pad_hidden(ffn: Mapping[str, Tensor], hidden: int) -> dict[str, Tensor]:
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

    ConfigError if there are several, or the weight depends on the token.
    """
    if block.is_dense:
        return DENSE_EXPERT, 1.0
    moe = block.moe
    gate, groups_GE = moe.gate, moe.group_experts_GE
    if not isinstance(gate, TopKGate):
        raise _unsupported(block, f"its gate is a {type(gate).__name__}, no TopKGate")
    renormalize = gate.renormalize or moe.num_experts == 1
    if gate.k != 1 or gate.capacity is not None or not renormalize:
        raise _unsupported(
            block,
            f"its gate has k={gate.k}, capacity={gate.capacity} and "
            f"renormalize={gate.renormalize}",
        )
    if groups_GE is None:
        raise _unsupported(block, "its experts belong to no dataset")
    experts = groups_GE[group].nonzero().flatten().tolist()
    if len(experts) != 1:
        raise _unsupported(block, f"the dataset has {len(experts)} experts")
    return experts[0], float(gate.weight_scale)


def _ffn_part(
    block: MoEFFN, bank: Any, expert: int, weight: float
) -> dict[str, Tensor]:
    """One expert as mmcv's FFN, its output multiplied by ``weight``."""
    if not isinstance(bank, FFNExperts):
        raise _unsupported(block, f"its experts are {type(bank).__name__}")
    if bank.activation != block.dense_activation:
        raise _unsupported(
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


def linear_map(block: MoEFFN, group: int) -> tuple[Tensor, Tensor]:
    """Factors down_LD and up_DL of a group's expert, its gate weight in the second.

    ConfigError if no such map equals the block, see `chosen_expert`.
    """
    expert, weight = chosen_expert(block, group)
    bank = block.moe.experts
    if not isinstance(bank, LowRankExperts):
        raise _unsupported(block, f"its experts are {type(bank).__name__}")
    down_LD, up_DL = bank.down_EDL[expert].t(), bank.up_ELD[expert].t()
    return down_LD.detach(), up_DL.detach() * weight


def linear_units(
    block: MoEFFN, group: int, *, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Weights of 2 L hidden units of an FFN that equal `linear_map`: z = f(z) - f(-z).

    ConfigError if the activation f is not like this, or there is no such map.
    """
    down_LD, up_DL = linear_map(block, group)
    if activation not in ODD_PARTS:
        raise _unsupported(block, f"its FFNs have {activation}, not a ReLU")
    return torch.cat([down_LD, -down_LD]), torch.cat([up_DL, -up_DL], dim=1)


def _linear_part(block: MoEFFN, group: int) -> dict[str, Tensor]:
    """A linear map as mmcv's FFN."""
    rows_HD, columns_DH = linear_units(block, group, activation=block.dense_activation)
    return {
        "0.0.weight": rows_HD,
        "0.0.bias": rows_HD.new_zeros(len(rows_HD)),
        "1.weight": columns_DH,
        "1.bias": columns_DH.new_zeros(len(columns_DH)),
    }


def _unsupported(block: MoEFFN, reason: str) -> ConfigError:
    return ConfigError(
        f"no dense detector equals this mixture of experts: in {block.name}, {reason}. "
        "One expert per dataset, k=1 and renormalize=True, as in damex_best, can be "
        "exported."
    )


class ImageVotes:
    """Votes of a batch, over the layers so far; the packing of its padded tokens.

    ``labels`` are the classes of each dataset group. ``real_BN1`` is False for padded
    tokens of the encoder or decoder, None without padding.
    """

    def __init__(self, labels: Sequence[Sequence[int]]) -> None:
        self.labels = labels
        self.begin()

    def begin(self) -> None:
        """Reset before a batch."""
        self.real_BN1: Tensor | None = None
        self._votes: list[Tensor] = []
        self._posteriors: list[Tensor] = []

    def unpack(self, values_BN: Tensor) -> Tensor:
        """Fill padded tokens with 0, as a `Packing` does."""
        if self.real_BN1 is None:
            return values_BN
        return values_BN.masked_fill(~self.real_BN1, 0.0)

    def count(self, logits_BNE: Tensor, experts_GE: Tensor) -> RoutingRecord:
        """Add the votes of a layer, and return its record, which has no routes."""
        tokens: Any = self  # instead of a Packing: tensors keep the axes B and N
        self._votes.append(image_votes(logits_BNE, experts_GE, tokens))
        routes: Any = None
        record = RoutingRecord(logits_BNE, tokens, routes, group_experts_GE=experts_GE)
        self._posteriors.append(router_posterior(record))
        return record

    def elected(self) -> Tensor:
        """Return group_B, elected by all layers so far."""
        return torch.stack(self._votes).sum(0).argmax(1)

    def probabilities(self) -> Tensor:
        """Return probabilities_BG, the mean over layers, like `group_posterior`."""
        return torch.stack(self._posteriors).mean(0)


class VotedLayer(nn.Module):
    """Replacement of a block's `MoELayer` that looks up the expert of each image.

    ``votes`` is shared by all layers. ConfigError if its tokens do not choose one
    expert per image.
    """

    experts_GE: Tensor
    expert_G: Tensor

    def __init__(self, block: MoEFFN, votes: ImageVotes) -> None:
        super().__init__()
        moe = block.moe
        if moe.group_choice.chooser(training=False) != "image":
            raise ConfigError(
                f"in {block.name}, every token chooses its expert, which no file of a "
                "whole mixture can express; train with moe.image_vote=True (or set it "
                "and test: the weights are the same), or export one --dataset."
            )
        if type(moe.experts) not in _BANKS:
            raise ConfigError(
                f"in {block.name}, experts are {type(moe.experts).__name__}; a whole "
                f"mixture can have {', '.join(kind.__name__ for kind in _BANKS)}."
            )
        experts_GE = cast(Tensor, moe.group_experts_GE)
        chosen = [chosen_expert(block, group) for group in range(len(experts_GE))]
        self.votes, self.weight = votes, chosen[0][1]
        self.router, self.bank = moe.router, moe.experts
        self.shared = None if moe.shared_expert is None else moe.shared_expert.expert
        self.register_buffer("experts_GE", experts_GE)
        self.register_buffer("expert_G", torch.tensor([number for number, _ in chosen]))

    def forward(self, tokens_BND: Tensor, **_: Any) -> tuple[Tensor, RoutingRecord]:
        """Return the output of the experts, like `MoELayer.forward` in eval mode."""
        record = self.votes.count(self.router(tokens_BND), self.experts_GE)
        expert_B = self.expert_G[self.votes.elected()]
        out_BND = _BANKS[type(self.bank)](self.bank, tokens_BND, expert_B) * self.weight
        if self.shared is not None:
            out_BND = out_BND + self.shared.forward_expert(tokens_BND, expert=0)
        return self.votes.unpack(out_BND), record


def _ffn(bank: Any, tokens_BND: Tensor, expert_B: Tensor) -> Tensor:
    """Output of `FFNExperts`; image b uses expert ``expert_B[b]``."""
    hidden_BNH = tokens_BND @ bank.w1_EDH[expert_B] + bank.b1_EH[expert_B][:, None]
    slope = None if bank.slope_E1 is None else bank.slope_E1[expert_B][:, None]
    hidden_BNH = bank.activate(hidden_BNH, slope)
    return hidden_BNH @ bank.w2_EHD[expert_B] + bank.b2_ED[expert_B][:, None]


def _low_rank(bank: Any, tokens_BND: Tensor, expert_B: Tensor) -> Tensor:
    """Output of `LowRankExperts`."""
    return tokens_BND @ bank.down_EDL[expert_B] @ bank.up_ELD[expert_B]


_BANKS = {FFNExperts: _ffn, LowRankExperts: _low_rank}


def voted_detector(
    detector: RoutedDetector, labels: Sequence[Sequence[int]], path: str
) -> tuple[Any, ImageVotes]:
    """Replace the experts of a detector in place by `VotedLayer`; return it with votes.

    The detector must be in eval mode; its class becomes that which damex extends.
    ``labels`` are the classes of each dataset group. ConfigError if experts are not in
    FFNs, or do not predict one dataset per image.
    """
    blocks: Any = moe_blocks(detector)
    predicts = blocks and classifies_datasets(detector)
    known = detector.awareness and detector.awareness.config
    problems = {
        "label_prior or dataset_head": known and (known.label_prior or known.head),
        "no experts, or none that were trained to predict the dataset": not predicts,
    }
    reason = "so that it can be exported with --dataset NAME alone, if at all"
    reject(detector, path, problems, reason)
    votes = ImageVotes(labels)
    for block in blocks:
        block.moe = VotedLayer(block, votes)
    detector.__class__ = mmdet_class(detector)  # opens no routing step
    return detector, votes
