"""Restricting tokens to the experts of one dataset group: by dataset or by image vote.

Axes: B images, V real tokens, E experts, G dataset groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from damex.moe.routing import Packing


@dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """Options that restrict an image's tokens to the experts of one group.

    The router chooses freely within the group; by default, among all experts. Only the
    choice is restricted: a route keeps the weight that the gate gives its expert among
    all experts, so weights mean the same in training and evaluation. (Weights within
    the group would be larger; in the evaluation of a trained DAMEX they cost 0.01 AP.)

    Attributes:
        teacher_forcing: In training the dataset of the image, if known, chooses the
            group. Losses see the logits of all experts, so the router learns as without
            it.
        image_vote: In evaluation the tokens of an image choose one group together: the
            one with the largest sum over tokens of the log-probability of its experts,
            in this layer and those before it.
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
    # The host need not know which rows are free.
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

    It is the log-likelihood of the group if tokens were independent: unlike in a
    majority vote, one certain token outweighs several uncertain ones. The sums are
    float64, so that padding and other images, which change their order, do not change
    the winner.
    """
    log_prob_V1E = torch.log_softmax(logits_VE.double(), dim=1).unsqueeze(1)
    own_VGE = log_prob_V1E.masked_fill(~group_experts_GE, -torch.inf)
    return packing.unpack(torch.logsumexp(own_VGE, dim=2)).sum(1)


def group_experts_mask(
    group_experts: Sequence[Sequence[int]], *, num_experts: int
) -> Tensor:
    """Turn lists of expert ids, one per dataset group, into a bool mask (G, E).

    Raises ValueError if there is no group, a group is empty, or an id is out of range.
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
