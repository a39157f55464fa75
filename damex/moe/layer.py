"""The mixture-of-experts layer, composed of router, gate, experts and losses.

Axes: B images, N tokens per image (padding included), V real tokens of the batch, D
model width, E experts, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from damex.moe.experts import SharedExpert
from damex.moe.gates import Gate
from damex.moe.losses import RoutingLoss
from damex.moe.routers import Router
from damex.moe.routing import (
    GroupChoice,
    Packing,
    RoutingRecord,
    allowed_experts,
    image_votes,
)
from damex.moe.shards import ExpertShards


class Experts(Protocol):
    """A module with E experts, stacked in one tensor per parameter.

    Every parameter must get a gradient (possibly zero) in every backward pass, also
    without tokens. Optional attributes: `output_names`, the parameters whose zero makes
    the output zero (to start a layer as its shared expert); `expert_rows`, the
    parameters and buffers whose first axis counts experts (to reorder, add or remove
    datasets; also of routers and gates); `needs_shared_expert`, if the experts are not
    an FFN by themselves.
    """

    num_experts: int

    def __call__(self, tokens_RD: Tensor, counts_E: Tensor, /) -> Tensor:
        """Map rows sorted by expert to outputs (R, D)."""

    def reset_parameters(self) -> None:
        """Re-initialize the parameters."""


class MoELayer(nn.Module):
    """Route tokens to experts and sum their weighted outputs.

    Packs the real tokens at the start and unpacks them at the end: all parts see real
    tokens only. The caller adds the residual; losses are returned in the RoutingRecord.
    In evaluation no loss is computed, group ids have no effect (except with
    `GroupChoice.oracle`), and the result of an image does not depend on padding nor,
    unless the gate has an `ExpertCapacity`, on the other images. The router computes in
    float32, the experts in the dtype of autocast, if enabled; the output has the dtype
    of the tokens.

    torch.compile gives one graph (fullgraph=True) with the 'grouped_mm' backend;
    'split' breaks it before the experts. Build the packing outside of the graph, and
    set `torch._dynamo.config.capture_dynamic_output_shape_ops` if the number of routes
    depends on the data: for `DenseToSparseGate`, unless it keeps all routes,
    `ExpertCapacity`, and `ExpertChoiceGate` with padding.

    Args:
        shared_expert: Applied to every token in addition to its routed experts.
        losses: Routing losses to compute in training.
        group_experts: For each dataset group the ids of its experts, possibly shared
            with other groups; stored in the checkpoint as `group_experts_GE`.
        group_choice: Whether an image's tokens are restricted to the experts of one
            group.
    """

    group_experts_GE: Tensor | None

    def __init__(
        self,
        *,
        router: Router,
        gate: Gate,
        experts: Experts,
        shared_expert: SharedExpert | None = None,
        losses: Sequence[RoutingLoss] = (),
        group_experts: Sequence[Sequence[int]] | None = None,
        group_choice: GroupChoice | None = None,
    ) -> None:
        super().__init__()
        if router.num_experts != experts.num_experts:
            raise ValueError(
                f"MoELayer: the router scores {router.num_experts} experts, but there "
                f"are {experts.num_experts}; give both the same num_experts"
            )
        self.router = router
        self.gate = gate
        self.experts = experts
        self.shared_expert = shared_expert
        self.losses = tuple(losses)
        self.shards: ExpertShards | None = None
        mask_GE = None
        if group_experts is not None:
            mask_GE = group_experts_mask(group_experts, num_experts=experts.num_experts)
        self.register_buffer("group_experts_GE", mask_GE)
        num_groups = None if mask_GE is None else mask_GE.shape[0]
        names = [loss.name for loss in self.losses]
        if len(set(names)) != len(names):
            raise ValueError(f"MoELayer: two losses share a name, got {names}")
        for loss in self.losses:
            loss.check_layer(gate=gate, num_groups=num_groups)
        self.set_group_choice(group_choice or GroupChoice())

    @property
    def num_experts(self) -> int:
        """E."""
        return self.experts.num_experts

    def reset_parameters(self) -> None:
        """Re-initialize router and experts."""
        self.router.reset_parameters()
        if self.shards is None:
            self.experts.reset_parameters()
        else:  # so that random draws are those of one process
            with self.shards.gathered(cast(nn.Module, self.experts)):
                self.experts.reset_parameters()
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()

    def shard_experts(self, shards: ExpertShards) -> None:
        """Keep the experts of this process; all processes exchange tokens in `forward`.

        They must call it equally often, with any number of tokens, and DDP must not
        reduce expert gradients, see `damex.moe.ExpertGradients`.
        """
        shards.shard(cast(nn.Module, self.experts))
        self.shards = shards

    def forward(
        self,
        tokens_BND: Tensor,
        *,
        packing: Packing | None = None,
        group_ids_B: Tensor | None = None,
        foreground_BN: Tensor | None = None,
        earlier_votes_BG: Tensor | None = None,
    ) -> tuple[Tensor, RoutingRecord]:
        """Route the tokens of a batch, or raise ValueError for wrong shapes or ids.

        Args:
            tokens_BND: Tokens, batch first.
            packing: Which tokens are real; None when all are. Layers may share one.
            group_ids_B: Dataset group of each image, -1 if unknown. Read by losses in
                training, by `GroupChoice` and by metrics. Range-checked on the CPU
                only.
            foreground_BN: bool, True for tokens on an object, for losses that read it.
            earlier_votes_BG: With `image_vote`, `votes_BG` of the previous layer, if
                any.

        Returns:
            out_BND, in the dtype of the tokens and exactly zero for padding, and the
            record of the routing, with the weighted losses in training.
        """
        record = self.route(
            tokens_BND,
            packing=packing,
            group_ids_B=group_ids_B,
            foreground_BN=foreground_BN,
            earlier_votes_BG=earlier_votes_BG,
        )
        tokens_VD = record.packing.pack(tokens_BND)
        assignment = record.assignment
        rows_RD, counts_E = assignment.dispatch(tokens_VD), assignment.counts_E
        if self.shards is None:
            out_RD = self.experts(rows_RD, counts_E)
        else:
            out_RD = self.shards.run(self.experts, rows_RD, counts_E)
        out_VD = assignment.combine(out_RD).to(tokens_BND.dtype)
        if self.shared_expert is not None:
            # DeepSeekMoE: the shared expert's output is added with weight 1.
            out_VD = out_VD + self.shared_expert(tokens_VD).to(out_VD.dtype)
        return record.packing.unpack(out_VD), record

    def route(
        self,
        tokens_BND: Tensor,
        *,
        packing: Packing | None = None,
        group_ids_B: Tensor | None = None,
        foreground_BN: Tensor | None = None,
        earlier_votes_BG: Tensor | None = None,
    ) -> RoutingRecord:
        """Compute router, gate and losses only, for callers that run the experts.

        Takes the arguments of `forward` and raises the same errors.
        """
        packing = self._check_forward(tokens_BND, packing, group_ids_B, foreground_BN)
        logits_VE = self.router(packing.pack(tokens_BND))
        group_ids_V = None
        if group_ids_B is not None:
            group_ids_V = packing.spread(group_ids_B.to(logits_VE.device))
        chosen_V = group_ids_V if self._chooser == "dataset" else None
        votes_BG, allowed = None, {}
        if self._chooser == "image" and self.group_experts_GE is not None:
            votes_BG = image_votes(logits_VE, self.group_experts_GE, packing)
            if earlier_votes_BG is not None:
                votes_BG = earlier_votes_BG + votes_BG
            chosen_V = packing.spread(votes_BG.argmax(1))
        if chosen_V is not None and self.group_experts_GE is not None:
            allowed["allowed_VE"] = allowed_experts(chosen_V, self.group_experts_GE)
        record = RoutingRecord(
            logits_VE=logits_VE,
            packing=packing,
            assignment=self.gate(logits_VE, packing, **allowed),
            group_ids_V=group_ids_V,
            group_experts_GE=self.group_experts_GE,
            foreground_V=None if foreground_BN is None else packing.pack(foreground_BN),
            votes_BG=votes_BG,
            is_forced=self._chooser == "dataset",
        )
        if self.training:
            losses = {loss.name: loss.weight * loss(record) for loss in self.losses}
            record = dataclasses.replace(record, losses=losses)
        return record

    @property
    def _chooser(self) -> str:
        return self.group_choice.chooser(training=self.training)

    def set_group_choice(self, choice: GroupChoice) -> None:
        """Set what chooses the group from now on.

        Raises ValueError, changing nothing, without groups or if the gate does not
        support it.
        """
        if choice.options:
            if self.group_experts_GE is None:
                raise ValueError(
                    f"{' and '.join(choice.options)} needs group_experts, the experts "
                    "of each dataset group, e.g. group_experts=[[0], [1]] for two "
                    "datasets"
                )
            smallest = int(self.group_experts_GE.sum(1).min())
            self.gate.check_group_choice(choice, smallest=smallest)
        self.group_choice = choice

    def _check_forward(
        self,
        tokens_BND: Tensor,
        packing: Packing | None,
        group_ids_B: Tensor | None,
        foreground_BN: Tensor | None,
    ) -> Packing:
        """Check the inputs and return the packing; by default all tokens are real."""
        if tokens_BND.dim() != 3:
            raise ValueError(
                "MoELayer: tokens_BND must be (B, N, D), got shape "
                f"{tuple(tokens_BND.shape)}"
            )
        size = (tokens_BND.shape[0], tokens_BND.shape[1])
        if packing is None:
            packing = Packing(*size)
        if (packing.num_images, packing.num_tokens) != size:
            raise ValueError(
                f"MoELayer: the packing has {packing.num_images} images with "
                f"{packing.num_tokens} tokens each, but tokens_BND has {size[0]} with "
                f"{size[1]}; build it from the mask of these tokens"
            )
        if foreground_BN is not None and (
            foreground_BN.shape != size or foreground_BN.dtype != torch.bool
        ):
            raise ValueError(
                f"MoELayer: foreground_BN must be bool of shape {size}, got "
                f"{foreground_BN.dtype} of shape {tuple(foreground_BN.shape)}"
            )
        self._check_group_ids(group_ids_B, size[0])
        return packing

    def _check_group_ids(self, group_ids_B: Tensor | None, num_images: int) -> None:
        if group_ids_B is None:
            losses = self.losses if self.training else ()
            readers = [loss.name for loss in losses if loss.needs_groups]
            if self._chooser == "dataset":
                readers.append("teacher_forcing" if self.training else "oracle")
            if readers:
                raise ValueError(
                    f"MoELayer: in {'training' if self.training else 'evaluation'} "
                    f"{readers} need group_ids_B, the dataset group of each image (-1 "
                    "if unknown), but got None"
                )
            return
        if group_ids_B.shape != (num_images,) or group_ids_B.dtype != torch.int64:
            raise ValueError(
                f"MoELayer: group_ids_B must be int64 of shape ({num_images},), got "
                f"{group_ids_B.dtype} of shape {tuple(group_ids_B.shape)}"
            )
        if self.group_experts_GE is None or group_ids_B.device.type != "cpu":
            return
        if torch.compiler.is_compiling():  # values are unknown until the graph runs
            return
        num_groups = self.group_experts_GE.shape[0]
        if any(not -1 <= group < num_groups for group in group_ids_B.tolist()):
            raise ValueError(
                f"MoELayer: group_ids_B must lie in [-1, {num_groups}), as "
                f"group_experts has {num_groups} groups, got {group_ids_B.tolist()}"
            )


def group_experts_mask(
    group_experts: Sequence[Sequence[int]], *, num_experts: int
) -> Tensor:
    """Turn lists of expert ids, one per dataset group, into a bool mask (G, E).

    Raises ValueError for no group, an empty one, or an id that is out of range.
    """
    if len(group_experts) == 0:
        raise ValueError("group_experts: needs at least one dataset group, got none")
    mask_GE = torch.zeros(len(group_experts), num_experts, dtype=torch.bool)
    for group, experts in enumerate(group_experts):
        if len(experts) == 0 or not all(0 <= e < num_experts for e in experts):
            raise ValueError(
                f"group_experts: group {group} must name one or more ids in "
                f"[0, {num_experts}), got {experts}; correct it or raise num_experts"
            )
        mask_GE[group, [*experts]] = True
    return mask_GE
