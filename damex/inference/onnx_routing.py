"""Experts in an ONNX graph: one expert per image, chosen by the votes of its tokens.

Graphs cannot dispatch a variable number of tokens. If the tokens of an image vote on
one expert (``image_vote``), its weights are looked up per image instead.

Axes: B images, N tokens per image, D model width, H hidden width, E experts, G dataset
groups.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from damex.errors import ConfigError
from damex.inference.dense_ffn import chosen_expert
from damex.models.blocks import MoEFFN
from damex.models.detectors import RoutedDetector, mmdet_class
from damex.models.insertion import moe_blocks
from damex.models.told_dataset import can_tell_datasets
from damex.moe import AffineExperts, FFNExperts, LowRankExperts


class ImageVotes:
    """Votes of a batch, accumulated over layers.

    ``real_BN1`` is False for padded tokens of the encoder or decoder, None without
    padding.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset before a batch."""
        self.real_BN1: Tensor | None = None
        self._votes_BG: Tensor | None = None
        self._shares: list[Tensor] = []

    def count(self, logits_BNE: Tensor, experts_GE: Tensor) -> Tensor:
        """Add the votes of a layer, like `damex.moe.routing.image_votes`.

        ``experts_GE`` marks the one expert of each group; returns group_B, elected so
        far.
        """
        real_BN1 = self.real_BN1
        if real_BN1 is None:
            real_BN1 = torch.ones_like(logits_BNE[..., :1], dtype=torch.bool)
        own_EG = experts_GE.T.to(logits_BNE.dtype)
        log_BNG = torch.log_softmax(logits_BNE, -1) @ own_EG
        votes_BG = log_BNG.masked_fill(~real_BN1, 0.0).sum(1)
        if self._votes_BG is not None:
            votes_BG = self._votes_BG + votes_BG
        self._votes_BG = votes_BG
        share_BNG = torch.softmax(logits_BNE, -1) @ own_EG
        share_BNG = share_BNG / share_BNG.sum(-1, keepdim=True)
        sums_BG = share_BNG.masked_fill(~real_BN1, 0.0).sum(1)
        self._shares.append(sums_BG / sums_BG.sum(-1, keepdim=True))
        return votes_BG.argmax(1)

    def probabilities(self) -> Tensor:
        """Return probabilities_BG, the mean over layers, like `group_posterior`."""
        return torch.stack(self._shares).mean(0)


class VotedFFN(nn.Module):
    """Replacement of a ``MoEFFN`` in eval mode that looks up the expert of each image.

    ``votes`` is shared by all layers.

    Raises:
        ConfigError: If its tokens do not choose one expert per image.
    """

    experts_GE: Tensor
    expert_G: Tensor

    def __init__(self, block: MoEFFN, votes: ImageVotes) -> None:
        super().__init__()
        moe = block.moe
        if moe.group_choice.chooser(training=False) != "image":
            raise ConfigError(
                f"in {block.name}, every token chooses an expert of its own, which no "
                "ONNX graph can say; train with moe.image_vote=True (or set it and "
                "test: the weights are the same), or export one --dataset."
            )
        if type(moe.experts) not in _BANKS:
            raise ConfigError(
                f"in {block.name}, experts are {type(moe.experts).__name__}; as ONNX "
                f"{', '.join(kind.__name__ for kind in _BANKS)} can be written."
            )
        experts_GE = cast(Tensor, moe.group_experts_GE)
        chosen = [chosen_expert(block, group) for group in range(len(experts_GE))]
        self.votes, self.weight = votes, chosen[0][1]
        self.norm, self.gamma2 = block.norm, block.gamma2
        self.router, self.bank = moe.router, moe.experts
        self.shared = None if moe.shared_expert is None else moe.shared_expert.expert
        self.register_buffer("experts_GE", experts_GE)
        self.register_buffer("expert_G", torch.tensor([number for number, _ in chosen]))

    def forward(self, query_BND: Tensor, identity_BND: Tensor | None = None) -> Tensor:
        """Add the output of the experts to the query, like `MoEFFN.forward`."""
        tokens_BND = query_BND if self.norm is None else self.norm(query_BND)
        group_B = self.votes.count(self.router(tokens_BND), self.experts_GE)
        run = _BANKS[type(self.bank)]
        out_BND = run(self.bank, tokens_BND, self.expert_G[group_B]) * self.weight
        if self.shared is not None:
            out_BND = out_BND + self.shared.forward_expert(tokens_BND, expert=0)
        if self.votes.real_BN1 is not None:
            out_BND = out_BND.masked_fill(~self.votes.real_BN1, 0.0)
        return (query_BND if identity_BND is None else identity_BND) + self.gamma2(
            out_BND
        )


def _ffn(bank: Any, tokens_BND: Tensor, expert_B: Tensor) -> Tensor:
    """Output of `FFNExperts`; image b uses expert ``expert_B[b]``."""
    hidden_BNH = tokens_BND @ bank.w1_EDH[expert_B] + bank.b1_EH[expert_B][:, None]
    slope = None if bank.slope_E1 is None else bank.slope_E1[expert_B][:, None]
    hidden_BNH = bank.activate(hidden_BNH, slope)
    return hidden_BNH @ bank.w2_EHD[expert_B] + bank.b2_ED[expert_B][:, None]


def _low_rank(bank: Any, tokens_BND: Tensor, expert_B: Tensor) -> Tensor:
    """Output of `LowRankExperts`."""
    return tokens_BND @ bank.down_EDL[expert_B] @ bank.up_ELD[expert_B]


def _affine(bank: Any, tokens_BND: Tensor, expert_B: Tensor) -> Tensor:
    """Output of `AffineExperts`."""
    scale_B1D, shift_B1D = bank.gamma_ED[expert_B], bank.beta_ED[expert_B]
    return tokens_BND * scale_B1D[:, None] + shift_B1D[:, None]


_BANKS = {FFNExperts: _ffn, LowRankExperts: _low_rank, AffineExperts: _affine}


def voted_detector(detector: RoutedDetector, path: str) -> tuple[Any, ImageVotes]:
    """Replace the experts of a detector by `VotedFFN`, in place; return it with votes.

    The detector must be in eval mode; its class becomes mmdet's.

    Raises:
        ConfigError: If experts are not in FFNs, or do not predict one dataset per
            image.
    """
    blocks = moe_blocks(detector)
    faults = {
        "label_prior or dataset_conditioning": detector.awareness is not None,
        "moe.channels": detector.channel_gating is not None,
        "experts in its backbone": any(not isinstance(b, MoEFFN) for b in blocks),
        "no experts, or none that were taught to tell datasets": not blocks
        or not can_tell_datasets(detector),
    }
    for what, found in faults.items():
        if found:
            raise ConfigError(
                f"the detector in {path} has {what}; as ONNX it can be written with "
                "--dataset NAME alone, if at all."
            )
    votes = ImageVotes()
    for name, module in [*detector.named_modules()]:
        if isinstance(module, MoEFFN):
            detector.set_submodule(name, VotedFFN(module, votes))
    detector.__class__ = mmdet_class(detector)  # no damex code remains
    return detector, votes
