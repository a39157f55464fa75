"""The mixture-of-experts layer: router, gate, experts and losses put together.

`MoELayer.forward` takes the real tokens out of the images at its start and puts them
back at its end; whatever it calls sees real tokens only.

Axes: B images, N tokens per image (padding included), V real tokens of the batch,
D model width, E experts, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from damex.moe.experts import SharedExpert
from damex.moe.gates import Gate
from damex.moe.group_choice import (
    GroupChoice,
    allowed_experts,
    group_experts_mask,
    image_votes,
)
from damex.moe.losses import RoutingLoss
from damex.moe.routing import Assignment, Packing, RoutingRecord
from damex.moe.shards import ExpertShards


class Router(Protocol):
    """A module that scores experts for tokens: (..., D) -> logits (..., E), row by row.

    Logits are float32 (or float64) whatever autocast says, and their softmax over E is
    the routing distribution. Rows must not look at each other.
    """

    num_experts: int

    def __call__(self, tokens: Tensor, /) -> Tensor:
        """Returns the logits of each row of `tokens`."""

    def reset_parameters(self) -> None:
        """Draws new parameters."""


class Experts(Protocol):
    """A module that is a bank of E experts, in one tensor per parameter.

    Every parameter must get a gradient (zeros if need be) on every backward, also when
    an expert, or all of them, received no token.

    A bank may name, in `output_names`, the parameters that make it answer zero when
    they are zero; it can then be muted beside a shared expert that starts as a dense
    FFN. It names in `expert_rows` the parameters and buffers whose first axis counts
    experts; without that, datasets cannot be reordered, added or taken away (the same
    holds for a router or a gate with tensors). One that says `needs_shared_expert` is
    no FFN by itself.
    """

    num_experts: int

    def __call__(self, tokens_RD: Tensor, counts_E: Tensor, /) -> Tensor:
        """Maps rows sorted by expert to outputs of shape (R, D)."""

    def reset_parameters(self) -> None:
        """Draws new parameters."""


class MoELayer(nn.Module):
    """Routes tokens to experts and adds their weighted outputs up.

    There is no residual, norm or shared state in here: the caller adds the identity
    path, and losses are returned in the RoutingRecord. In evaluation no loss is
    computed, group ids change nothing (but for `GroupChoice.oracle`), and an image's
    result does not depend on padding nor, unless the gate has an `ExpertCapacity`, on
    the other images.

    torch.compile makes one graph (fullgraph=True) with any gate of damex when the
    experts' backend is 'grouped_mm'; 'split' reads the counts on the host and breaks
    the graph before the experts. Make the packing outside of the graph. Where the gate
    decides how many routes there are, the graph has to be told to expect that: set
    `torch._dynamo.config.capture_dynamic_output_shape_ops` for `DenseToSparseGate`
    (unless its threshold is 0 and it has no `end_k`), an `ExpertCapacity`, and
    `ExpertChoiceGate` with padding.

    `spread_experts` shares the experts out among processes; all of them then have to
    call the layer the same number of times, with any number of tokens.

    Dtype policy: the router computes in float32 (see `LinearRouter`), the experts in
    autocast's dtype if there is one; the output has the dtype of the tokens.

    Args:
        router: Tokens -> logits.
        gate: Logits -> Assignment.
        experts: Rows sorted by expert -> outputs.
        shared_expert: What every token passes beside its routed experts, if any.
        losses: Routing losses to compute in training.
        group_experts: For each dataset group the ids of its experts; kept in the
            checkpoint as `group_experts_GE`. Groups may share experts.
        group_choice: Whether an image's tokens are kept to the experts of one group.

    Raises:
        ValueError: If the parts do not fit together or `group_experts` is not a map
            from groups to one or more existing experts.

    Attributes:
        shards: Where the experts are; None where all of them are here.
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
        """Draws the parameters of router and experts anew."""
        self.router.reset_parameters()
        with self._whole_experts():
            self.experts.reset_parameters()
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()

    def spread_experts(self, shards: ExpertShards) -> None:
        """Keeps the experts of this process; the others answer through the exchange.

        Router, gate and losses are as before. Gradients of experts are no matter of
        DDP from here on, see `damex.moe.expert_gradients`.

        Args:
            shards: Which experts are where.

        Raises:
            ValueError: If they cannot be shared out, see `ExpertShards.keep_own`.
        """
        shards.keep_own(cast(nn.Module, self.experts))
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
        """Routes the tokens of a batch.

        Args:
            tokens_BND: Tokens, batch first.
            packing: Which tokens are real; None when all are. Layers that see the same
                tokens may share one.
            group_ids_B: Dataset group of each image, -1 where unknown. Read only by
                losses in training and where datasets choose the group (see
                `GroupChoice`), and kept in the record for metrics. The range of
                ids that live on a GPU is not checked, as that would stall it.
            foreground_BN: bool, True for tokens on an object; read only by losses that
                ask for it.
            earlier_votes_BG: Where images choose their group, the `votes_BG` of the
                layer before; None where this is the first.

        Returns:
            out_BND: In the dtype of the tokens; padded tokens are exactly zero.
            record: What was routed, with the weighted losses when training.

        Raises:
            ValueError: If shapes or ids are wrong, or a loss lacks its group ids.
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
        out_RD = self._answers(tokens_VD, assignment)
        out_VD = assignment.combine(out_RD).to(tokens_BND.dtype)
        if self.shared_expert is not None:
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
        """Router, gate and losses alone, for callers that run the experts themselves.

        Args:
            tokens_BND: As in `forward`, like the rest.
            packing: See there.
            group_ids_B: See there.
            foreground_BN: See there.
            earlier_votes_BG: See there.

        Returns:
            What was routed, with the weighted losses when training.

        Raises:
            ValueError: As `forward`.
        """
        packing = self._check_forward(tokens_BND, packing, group_ids_B, foreground_BN)
        logits_VE = self.router(packing.pack(tokens_BND))
        group_ids_V = None
        if group_ids_B is not None:
            group_ids_V = packing.spread(group_ids_B.to(logits_VE.device))
        votes_BG = self._count_votes(logits_VE, packing, earlier_votes_BG)
        allowed_VE = self._allowed(packing, group_ids_V, votes_BG)
        limits = {} if allowed_VE is None else {"allowed_VE": allowed_VE}
        record = RoutingRecord(
            logits_VE=logits_VE,
            packing=packing,
            assignment=self.gate(logits_VE, packing, **limits),
            group_ids_V=group_ids_V,
            group_experts_GE=self.group_experts_GE,
            foreground_V=None if foreground_BN is None else packing.pack(foreground_BN),
            votes_BG=votes_BG,
            is_forced=self.group_choice.chooser(training=self.training) == "dataset",
        )
        if self.training:
            losses = {loss.name: loss.weight * loss(record) for loss in self.losses}
            record = dataclasses.replace(record, losses=losses)
        return record

    def _answers(self, tokens_VD: Tensor, assignment: Assignment) -> Tensor:
        """What the experts answer to each route, unweighted."""
        rows_RD = assignment.dispatch(tokens_VD)
        if self.shards is None:
            return self.experts(rows_RD, assignment.counts_E)
        return self.shards.run(self.experts, rows_RD, assignment.counts_E)

    def _whole_experts(self) -> AbstractContextManager[None]:
        """So that draws are those of one process, and not alike on all of them."""
        if self.shards is None:
            return nullcontext()
        return self.shards.whole(cast(nn.Module, self.experts))

    def _count_votes(
        self, logits_VE: Tensor, packing: Packing, earlier_votes_BG: Tensor | None
    ) -> Tensor | None:
        """Votes of these tokens and of the layers before; None where nobody votes."""
        chooser = self.group_choice.chooser(training=self.training)
        if chooser != "image" or self.group_experts_GE is None:
            return None
        votes_BG = image_votes(logits_VE, self.group_experts_GE, packing)
        return votes_BG if earlier_votes_BG is None else earlier_votes_BG + votes_BG

    def _allowed(
        self, packing: Packing, group_ids_V: Tensor | None, votes_BG: Tensor | None
    ) -> Tensor | None:
        """Experts that each token may be routed to; None where all are open."""
        chooser = self.group_choice.chooser(training=self.training)
        chosen_V = group_ids_V if chooser == "dataset" else None
        if votes_BG is not None:
            chosen_V = packing.spread(votes_BG.argmax(1))
        if chosen_V is None or self.group_experts_GE is None:
            return None
        return allowed_experts(chosen_V, self.group_experts_GE)

    def set_group_choice(self, choice: GroupChoice) -> None:
        """Sets who chooses the group from now on.

        Raises:
            ValueError: If there are no groups to choose, or the gate cannot keep tokens
                to one; then all stays as it was.
        """
        if choice.options:
            self._check_group_choice(choice)
        self.group_choice = choice

    def _check_group_choice(self, choice: GroupChoice) -> None:
        """Refuses options where there is no group, or the gate cannot keep to one."""
        if self.group_experts_GE is None:
            raise ValueError(
                f"{' and '.join(choice.options)} needs group_experts, the experts of "
                "each dataset group, e.g. group_experts=[[0], [1]] for two datasets"
            )
        smallest = int(self.group_experts_GE.sum(1).min())
        self.gate.check_group_choice(choice, smallest=smallest)

    def _check_forward(
        self,
        tokens_BND: Tensor,
        packing: Packing | None,
        group_ids_B: Tensor | None,
        foreground_BN: Tensor | None,
    ) -> Packing:
        """Returns the packing, that of all tokens if there is none."""
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
                f"MoELayer: the packing is of {packing.num_images} images with "
                f"{packing.num_tokens} tokens each, but tokens_BND has {size[0]} with "
                f"{size[1]}; make it of the mask of these tokens"
            )
        if foreground_BN is not None and (
            foreground_BN.shape != size or foreground_BN.dtype != torch.bool
        ):
            raise ValueError(
                f"MoELayer: foreground_BN must be bool of shape {size}, got "
                f"{foreground_BN.dtype} of shape {tuple(foreground_BN.shape)}"
            )
        if group_ids_B is not None:
            self._check_group_ids(group_ids_B, size[0])
        else:
            self._check_no_group_ids()
        return packing

    def _check_no_group_ids(self) -> None:
        """Refuses to go on without dataset groups where something reads them."""
        readers = []
        if self.training:
            readers = [loss.name for loss in self.losses if loss.needs_groups]
        if self.group_choice.chooser(training=self.training) == "dataset":
            readers.append("teacher_forcing" if self.training else "oracle")
        if readers:
            raise ValueError(
                f"MoELayer: in {'training' if self.training else 'evaluation'} "
                f"{readers} need group_ids_B, the dataset group of each image (-1 "
                "where unknown), but got None"
            )

    def _check_group_ids(self, group_ids_B: Tensor, num_images: int) -> None:
        if group_ids_B.shape != (num_images,) or group_ids_B.dtype != torch.int64:
            raise ValueError(
                f"MoELayer: group_ids_B must be int64 of shape ({num_images},), got "
                f"{group_ids_B.dtype} of shape {tuple(group_ids_B.shape)}"
            )
        if self.group_experts_GE is None or group_ids_B.device.type != "cpu":
            return
        if torch.compiler.is_compiling():  # values are known only when the graph runs
            return
        num_groups = self.group_experts_GE.shape[0]
        if any(not -1 <= group < num_groups for group in group_ids_B.tolist()):
            raise ValueError(
                f"MoELayer: group_ids_B must lie in [-1, {num_groups}), as "
                f"group_experts has {num_groups} groups, got {group_ids_B.tolist()}"
            )
