"""The mixture-of-experts layer: router, gate, experts and losses put together.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from damex.moe.experts import SharedExpert
from damex.moe.protocols import Experts, Gate, Router, RoutingLoss
from damex.moe.routing import RoutingRecord


class MoELayer(nn.Module):
    """Routes tokens to experts and adds their weighted outputs up.

    There is no residual, norm or shared state in here: the caller adds the identity
    path, and losses are returned in the RoutingRecord. In evaluation no loss is
    computed, group ids change nothing, and an image's result does not depend on
    padding nor, unless the gate has an `ExpertCapacity`, on the other images.

    torch.compile makes one graph (fullgraph=True) with any gate of damex when the
    experts' backend is 'grouped_mm'; 'split' reads the counts on the host and breaks
    the graph before the experts. With a token mask the number of routes is known only
    when the graph runs: set `torch._dynamo.config.capture_dynamic_output_shape_ops`;
    `RouterZLoss` and `DatasetRoutingLoss` then break it (torch.logsumexp asks whether
    there is any row), and the gates need not. `DenseToSparseGate` needs the setting
    without a mask, too, unless its threshold is 0 and it has no `end_k`.

    Dtype policy: the router computes in float32 (see `LinearRouter`), the experts in
    autocast's dtype if there is one; the output has the dtype of the tokens.

    Args:
        router: Tokens -> logits.
        gate: Logits -> Assignment.
        experts: Rows sorted by expert -> outputs.
        shared_expert: What every real token passes beside its routed experts, if any.
        losses: Routing losses to compute in training.
        group_experts: For each dataset group the ids of its experts; kept in the
            checkpoint as `group_experts_GE`. Groups may share experts.

    Raises:
        ValueError: If the parts do not fit together or `group_experts` is not a map
            from groups to one or more existing experts.
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
        mask_GE = None
        if group_experts is not None:
            mask_GE = group_experts_mask(group_experts, num_experts=experts.num_experts)
        self.register_buffer("group_experts_GE", mask_GE)
        num_groups = None if mask_GE is None else mask_GE.shape[0]
        _check_losses(self.losses, gate=gate, num_groups=num_groups)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.experts.num_experts

    def reset_parameters(self) -> None:
        """Draws the parameters of router and experts anew."""
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()

    def forward(
        self,
        tokens_BND: Tensor,
        *,
        token_mask_BN: Tensor | None = None,
        group_ids_B: Tensor | None = None,
        foreground_BN: Tensor | None = None,
    ) -> tuple[Tensor, RoutingRecord]:
        """Routes the tokens of a batch.

        Args:
            tokens_BND: Tokens, batch first.
            token_mask_BN: bool, True for real tokens (the opposite of a DETR
                key_padding_mask); None when all are real.
            group_ids_B: Dataset group of each image, -1 where unknown. Read only by
                losses in training, and kept in the record for metrics. The range of
                ids that live on a GPU is not checked, as that would stall it.
            foreground_BN: bool, True for tokens on an object; read only by losses that
                ask for it.

        Returns:
            out_BND: In the dtype of the tokens; padded tokens are exactly zero.
            record: What was routed, with the weighted losses when training.

        Raises:
            ValueError: If shapes or ids are wrong, or a loss lacks its group ids.
        """
        record = self.route(
            tokens_BND,
            token_mask_BN=token_mask_BN,
            group_ids_B=group_ids_B,
            foreground_BN=foreground_BN,
        )
        tokens_TD = tokens_BND.flatten(0, 1)
        assignment = record.assignment
        out_RD = self.experts(assignment.dispatch(tokens_TD), assignment.counts_E)
        out_TD = assignment.combine(out_RD).to(tokens_BND.dtype)
        if self.shared_expert is not None:
            shared_TD = self.shared_expert(tokens_TD, record.token_mask_T)
            out_TD = out_TD + shared_TD.to(out_TD.dtype)
        return out_TD.unflatten(0, tokens_BND.shape[:2]), record

    def route(
        self,
        tokens_BND: Tensor,
        *,
        token_mask_BN: Tensor | None = None,
        group_ids_B: Tensor | None = None,
        foreground_BN: Tensor | None = None,
    ) -> RoutingRecord:
        """Router, gate and losses alone, for callers that run the experts themselves.

        Args:
            tokens_BND: As in `forward`, like the rest.
            token_mask_BN: See there.
            group_ids_B: See there.
            foreground_BN: See there.

        Returns:
            What was routed, with the weighted losses when training.

        Raises:
            ValueError: As `forward`.
        """
        self._check_forward(tokens_BND, token_mask_BN, group_ids_B)
        _check_mask("foreground_BN", foreground_BN, tokens_BND)
        num_images, num_tokens, _ = tokens_BND.shape
        mask_T = None if token_mask_BN is None else token_mask_BN.flatten()
        logits_TE = self._score(tokens_BND.flatten(0, 1), mask_T)
        assignment = self.gate(
            logits_TE.unflatten(0, (num_images, num_tokens)), token_mask_BN
        )
        group_ids_T = None
        if group_ids_B is not None:
            group_ids_T = group_ids_B.to(tokens_BND.device)
            group_ids_T = group_ids_T.repeat_interleave(num_tokens)
        record = RoutingRecord(
            logits_TE=logits_TE,
            token_mask_T=mask_T,
            group_ids_T=group_ids_T,
            assignment=assignment,
            group_experts_GE=self.group_experts_GE,
            foreground_T=None if foreground_BN is None else foreground_BN.flatten(),
        )
        if self.training:
            losses = {loss.name: loss.weight * loss(record) for loss in self.losses}
            record = dataclasses.replace(record, losses=losses)
        return record

    def extra_repr(self) -> str:
        """Losses, for `print(module)`."""
        return f"losses={list(self.losses)}"

    def _score(self, tokens_TD: Tensor, mask_T: Tensor | None) -> Tensor:
        """Logits of real tokens; padded rows are never seen and get zeros."""
        if mask_T is None:
            return self.router(tokens_TD)
        tokens_V = mask_T.nonzero().squeeze(1)
        logits_VE = self.router(tokens_TD.index_select(0, tokens_V))
        zeros_TE = logits_VE.new_zeros(tokens_TD.shape[0], self.num_experts)
        return zeros_TE.index_copy(0, tokens_V, logits_VE)

    def _check_forward(
        self, tokens_BND: Tensor, mask_BN: Tensor | None, group_ids_B: Tensor | None
    ) -> None:
        if tokens_BND.dim() != 3:
            raise ValueError(
                "MoELayer: tokens_BND must be (B, N, D), got shape "
                f"{tuple(tokens_BND.shape)}"
            )
        _check_mask("token_mask_BN", mask_BN, tokens_BND)
        if group_ids_B is not None:
            self._check_group_ids(group_ids_B, tokens_BND.shape[0])
        elif self.training and any(loss.needs_groups for loss in self.losses):
            names = [loss.name for loss in self.losses if loss.needs_groups]
            raise ValueError(
                f"MoELayer: in training the losses {names} need group_ids_B, the "
                "dataset group of each image (-1 where unknown), but got None"
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


def group_experts_mask(
    group_experts: Sequence[Sequence[int]], *, num_experts: int
) -> Tensor:
    """Turns lists of expert ids, one per dataset group, into a bool mask.

    Args:
        group_experts: For each of the G groups the ids of its experts.
        num_experts: E.

    Returns:
        mask_GE: True where a group may use an expert.

    Raises:
        ValueError: If there is no group, a group is empty, or an id is out of range.
    """
    if len(group_experts) == 0:
        raise ValueError("group_experts: needs at least one dataset group, got none")
    mask_GE = torch.zeros(len(group_experts), num_experts, dtype=torch.bool)
    for group, experts in enumerate(group_experts):
        if len(experts) == 0:
            raise ValueError(
                f"group_experts: group {group} has no expert; name one or more ids in "
                f"[0, {num_experts})"
            )
        for expert in experts:
            if not 0 <= expert < num_experts:
                raise ValueError(
                    f"group_experts: group {group} names expert {expert}, but ids must "
                    f"lie in [0, {num_experts}); raise num_experts or mend the map"
                )
            mask_GE[group, expert] = True
    return mask_GE


def _check_mask(name: str, mask_BN: Tensor | None, tokens_BND: Tensor) -> None:
    shape = tokens_BND.shape[:2]
    if mask_BN is not None and (mask_BN.shape != shape or mask_BN.dtype != torch.bool):
        raise ValueError(
            f"MoELayer: {name} must be bool of shape {tuple(shape)}, got "
            f"{mask_BN.dtype} of shape {tuple(mask_BN.shape)}"
        )


def _check_losses(
    losses: Sequence[RoutingLoss], *, gate: Gate, num_groups: int | None
) -> None:
    names = [loss.name for loss in losses]
    if len(set(names)) != len(names):
        raise ValueError(f"MoELayer: two losses share a name, got {names}")
    for loss in losses:
        if not loss.weight >= 0.0:
            raise ValueError(
                f"MoELayer: the weight of loss {loss.name!r} must be >= 0, "
                f"got {loss.weight}"
            )
        if loss.needs_groups and num_groups is None:
            raise ValueError(
                f"MoELayer: loss {loss.name!r} needs group_experts, the experts of "
                "each dataset group, e.g. group_experts=[[0], [1]] for two datasets"
            )
        check = getattr(loss, "check_layer", None)
        if check is not None:
            check(gate=gate, num_groups=num_groups)
