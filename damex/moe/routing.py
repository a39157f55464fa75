"""Data structures of routing: which token goes to which expert, with what weight.

Axes: B images, N tokens per image (padding included), V real tokens of the batch, D
model width, E experts, K experts per token, R routes (token-expert pairs), G dataset
groups.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """The positions of the real tokens in a batch of images, gathered into V rows.

    `Packing(B, N)` has no padding, `of_mask` packs padded images. One packing serves
    all layers that see the same tokens; only building it synchronizes a GPU.
    `position_V` is the index of each real token among the B*N tokens, ascending; None
    when all are real.
    """

    num_images: int
    num_tokens: int
    position_V: Tensor | None = None

    @classmethod
    def of_mask(cls, token_mask_BN: Tensor) -> Packing:
        """Pack padded images by a bool mask, True for real tokens.

        This is the opposite of a DETR key_padding_mask; others raise ValueError.
        """
        if token_mask_BN.dim() != 2 or token_mask_BN.dtype != torch.bool:
            raise ValueError(
                "Packing.of_mask: token_mask_BN must be bool of shape (B, N), got "
                f"{token_mask_BN.dtype} of shape {tuple(token_mask_BN.shape)}"
            )
        position_V = token_mask_BN.flatten().nonzero().squeeze(1)
        return cls(token_mask_BN.shape[0], token_mask_BN.shape[1], position_V)

    def pack(self, values_BN: Tensor) -> Tensor:
        """Gather the rows of real tokens, (B, N, ...) -> (V, ...), image by image."""
        values = values_BN.flatten(0, 1)
        if self.position_V is None:
            return values
        return values.index_select(0, self.position_V)

    def unpack(self, values_V: Tensor, *, fill: float = 0) -> Tensor:
        """Scatter the rows of real tokens, (V, ...) -> (B, N, ...), and fill others."""
        shape = (self.num_images, self.num_tokens)
        if self.position_V is None:
            return values_V.unflatten(0, shape)
        blank = values_V.new_full((math.prod(shape), *values_V.shape[1:]), fill)
        return blank.index_copy(0, self.position_V, values_V).unflatten(0, shape)

    def spread(self, values_B: Tensor) -> Tensor:
        """Give every real token the value of its image, (B, ...) -> (V, ...)."""
        if self.position_V is None:
            return values_B.repeat_interleave(self.num_tokens, dim=0)
        return values_B.index_select(0, self.position_V // self.num_tokens)


@dataclass(frozen=True, eq=False)
class Assignment:
    """A list of routes, sorted by expert (stable: equal experts keep token order).

    Build it with `from_topk` or `from_pairs`, which sort. A token may have any number
    of routes.

    Attributes:
        token_index_R: Token of each route, an index into the V real tokens.
        expert_index_R: Expert of each route, ascending.
        weight_R: Weight of the expert's output.
        counts_E: Number of routes of each expert, int64; sums to R.
        routes_per_token: K if every token that has a route has exactly K, else None.
        dropped: Routes beyond the capacity of their expert (see `ExpertCapacity`), not
            counted in the other attributes; None without a capacity.
    """

    token_index_R: Tensor
    expert_index_R: Tensor
    weight_R: Tensor
    counts_E: Tensor
    num_tokens: int
    routes_per_token: int | None
    dropped: Assignment | None = None

    @classmethod
    def from_topk(
        cls, expert_ids_VK: Tensor, weights_VK: Tensor, *, num_experts: int
    ) -> Assignment:
        """Build the routes of a gate that gives every token K experts.

        Does not synchronize a GPU; gradients flow through the weights.
        """
        num_tokens, k = expert_ids_VK.shape
        expert_index = expert_ids_VK.reshape(-1)
        order_R = torch.argsort(expert_index, stable=True)
        return cls(
            token_index_R=order_R // k,
            expert_index_R=expert_index.index_select(0, order_R),
            weight_R=weights_VK.reshape(-1).index_select(0, order_R),
            counts_E=_count(expert_index, num_experts),
            num_tokens=num_tokens,
            routes_per_token=k,
        )

    @classmethod
    def from_pairs(
        cls,
        token_index: Tensor,
        expert_index: Tensor,
        weight: Tensor,
        *,
        num_tokens: int,
        num_experts: int,
    ) -> Assignment:
        """Build an assignment from (token, expert, weight) triples in any order.

        Gradients flow through the weights. Raises ValueError if the three are not 1-D
        of equal length or, on the CPU and outside of a compiled graph, if an index is
        out of range.
        """
        # In a compiled graph the number of pairs is unknown until it runs.
        if not torch.compiler.is_compiling():
            shapes = [tuple(x.shape) for x in (token_index, expert_index, weight)]
            if len(set(shapes)) != 1 or len(shapes[0]) != 1:
                raise ValueError(
                    "Assignment.from_pairs: token_index, expert_index and weight must "
                    f"be 1-D and of one length, got shapes {shapes}"
                )
            _check_range("token_index", token_index, num_tokens)
            _check_range("expert_index", expert_index, num_experts)
        order_R = torch.argsort(expert_index, stable=True)
        return cls(
            token_index_R=token_index.index_select(0, order_R),
            expert_index_R=expert_index.index_select(0, order_R),
            weight_R=weight.index_select(0, order_R),
            counts_E=_count(expert_index, num_experts),
            num_tokens=num_tokens,
            routes_per_token=None,
        )

    @property
    def num_routes(self) -> int:
        """R, the number of token-expert pairs."""
        return self.token_index_R.shape[0]

    @property
    def num_experts(self) -> int:
        """E, including experts without a route."""
        return self.counts_E.shape[0]

    def dispatch(self, tokens_VD: Tensor) -> Tensor:
        """Copy the tokens in the order of the routes, (R, D)."""
        return tokens_VD.index_select(0, self.token_index_R)

    def combine(self, expert_out_RD: Tensor) -> Tensor:
        """Sum the weighted expert outputs of each token, zero without a route.

        In the wider of the dtypes of outputs and weights, returned in that of the
        outputs. With `routes_per_token` it is bit-reproducible without atomic adds:
        routes are sorted by token and summed along an axis of length K. Otherwise rows
        are added in the order of the routes, on a GPU after a sort.
        """
        # Chen et al. 2022, section 3.2: F(x) = sum over m in T_x of pi_m(x) f_m(x).
        weighted_RD = expert_out_RD * self.weight_R.unsqueeze(1)
        if self.routes_per_token is None:
            zeros_VD = weighted_RD.new_zeros(self.num_tokens, weighted_RD.shape[1])
            tokens_VD = _add_rows(zeros_VD, self.token_index_R, weighted_RD)
        else:
            tokens_VD = self._combine_fixed(weighted_RD, self.routes_per_token)
        return tokens_VD.to(expert_out_RD.dtype)

    def keep(self, keep_R: Tensor) -> Assignment:
        """Keep the routes that are True and move the others to `dropped`."""
        return dataclasses.replace(self._subset(keep_R), dropped=self._subset(~keep_R))

    def _subset(self, mask_R: Tensor) -> Assignment:
        index_R = mask_R.nonzero().squeeze(1)  # in order, so still sorted
        expert_index_R = self.expert_index_R.index_select(0, index_R)
        return Assignment(
            token_index_R=self.token_index_R.index_select(0, index_R),
            expert_index_R=expert_index_R,
            weight_R=self.weight_R.index_select(0, index_R),
            counts_E=_count(expert_index_R, self.num_experts),
            num_tokens=self.num_tokens,
            # A token may lose one of several routes and keep another.
            routes_per_token=1 if self.routes_per_token == 1 else None,
        )

    def _combine_fixed(self, weighted_RD: Tensor, k: int) -> Tensor:
        num_routes, width = weighted_RD.shape
        order_R = torch.argsort(self.token_index_R, stable=True)
        by_token_RD = weighted_RD.index_select(0, order_R)
        summed_VD = by_token_RD.view(num_routes // k, k, width).sum(1)
        # In a compiled graph the number of routes may be unknown until it runs.
        if not torch.compiler.is_compiling() and num_routes == self.num_tokens * k:
            return summed_VD
        tokens_V = self.token_index_R.index_select(0, order_R[::k])
        zeros_VD = weighted_RD.new_zeros(self.num_tokens, width)
        return zeros_VD.index_copy(0, tokens_V, summed_VD)


def _add_rows(into_VD: Tensor, index_R: Tensor, rows_RD: Tensor) -> Tensor:
    """`index_add` along axis 0 in a reproducible order.

    On a GPU `index_add` is atomic, so its sums differ in the last bits between calls;
    accumulating `index_put` sorts first.
    """
    if into_VD.device.type == "cpu":
        return into_VD.index_add(0, index_R, rows_RD)
    return into_VD.index_put((index_R,), rows_RD, accumulate=True)


def _count(expert_index: Tensor, num_experts: int) -> Tensor:
    """Count the routes per expert; scatter_add because bincount synchronizes a GPU."""
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_index.device)
    return counts_E.scatter_add(0, expert_index, torch.ones_like(expert_index))


def _check_range(name: str, index: Tensor, limit: int) -> None:
    if index.device.type != "cpu" or index.numel() == 0:
        return
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= limit:
        raise ValueError(
            f"Assignment.from_pairs: {name} must lie in [0, {limit}), "
            f"got values from {low} to {high}"
        )


@dataclass(frozen=True, eq=False)
class RoutingRecord:
    """The routing of one forward pass; returned by the layer, which does not store it.

    Attributes:
        logits_VE: Clean router logits of all experts, before noise and restrictions,
            float32.
        group_ids_V: Dataset group of each token's image, -1 if unknown; None without
            ids.
        group_experts_GE: True if a group may use an expert; None without a map.
        foreground_V: True for tokens on an object; None if unknown.
        losses: Weighted losses by name; empty in evaluation.
        votes_BG: Log-probability of each group summed over the tokens of each image, in
            this layer and those before; None unless images choose their group.
        is_forced: Whether the dataset of the image chose the group, so that the routes
            do not depend on the router alone.
    """

    logits_VE: Tensor
    packing: Packing
    assignment: Assignment
    group_ids_V: Tensor | None = None
    group_experts_GE: Tensor | None = None
    foreground_V: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    votes_BG: Tensor | None = None
    is_forced: bool = False

    @property
    def probs_VE(self) -> Tensor:
        """Softmax of the clean logits over all experts."""
        return torch.softmax(self.logits_VE, dim=-1)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.logits_VE.shape[1]

    def groups(self, reader: str) -> tuple[Tensor, Tensor]:
        """Groups of tokens, experts of groups; ValueError that names the `reader`."""
        if self.group_ids_V is None or self.group_experts_GE is None:
            raise ValueError(
                f"{reader}: the routing record needs group_ids_V and group_experts_GE; "
                "give the layer group_experts and its forward group_ids_B"
            )
        return self.group_ids_V, self.group_experts_GE


@dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """Options that restrict an image's tokens to the experts of one group.

    The router chooses freely within the group. A route keeps the weight that the gate
    gives its expert among all experts, so weights mean the same in training and
    evaluation. (Weights within the group would be larger; in the evaluation of a
    trained DAMEX they cost 0.01 AP.)

    Attributes:
        teacher_forcing: In training the dataset of the image, if known, chooses the
            group. Losses see the logits of all experts, so the router learns as without
            it.
        image_vote: In evaluation the tokens of an image choose the group with the
            largest log-probability, summed over tokens, in this layer and those before
            it.
        oracle: In evaluation the dataset of the image chooses and `image_vote` is
            ignored. For analysis only, as users do not know the dataset.
    """

    teacher_forcing: bool = False
    image_vote: bool = False
    oracle: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that are on."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name))

    def chooser(self, *, training: bool) -> Literal["token", "image", "dataset"]:
        """Return what chooses the group; 'token' if all experts are open."""
        if training:
            return "dataset" if self.teacher_forcing else "token"
        if self.oracle:
            return "dataset"
        return "image" if self.image_vote else "token"


def allowed_experts(group_ids_V: Tensor, group_experts_GE: Tensor) -> Tensor:
    """Return a bool mask of the experts of each row's group, all for a group of -1."""
    free_V1 = (group_ids_V < 0).unsqueeze(1)
    return group_experts_GE[group_ids_V.clamp_min(0)] | free_V1


def restrict(scores_VE: Tensor, allowed_VE: Tensor) -> Tensor:
    """Set scores to minus infinity, without gradient, for experts not allowed."""
    return scores_VE.masked_fill(~allowed_VE, -torch.inf)


@torch.no_grad()
def image_votes(
    logits_VE: Tensor, group_experts_GE: Tensor, packing: Packing
) -> Tensor:
    """Sum the log-probability of each group's experts over the tokens of each image.

    It is the log-likelihood of the group if tokens were independent: one certain token
    outweighs several uncertain ones. In float64, so that padding and other images,
    which change the order of the sum, do not change the winner.
    """
    log_prob_V1E = torch.log_softmax(logits_VE.double(), dim=-1).unsqueeze(-2)
    own_VGE = log_prob_V1E.masked_fill(~group_experts_GE, -torch.inf)
    return packing.unpack(torch.logsumexp(own_VGE, dim=-1)).sum(1)
