"""Who chooses the dataset group whose experts a token may go to.

Each choice ends in one group per image, or in none, and so in the experts that are
allowed for a token, among which the gate chooses.

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
    """The options of a layer that keep an image's tokens to the experts of one group.

    Inside of the group the router chooses freely. Only the choice changes: a route has
    the weight that the gate gives its expert anyway, so that weights mean the same in
    training and evaluation, whichever options are on. (Weights taken inside of the
    group would be larger; in the evaluation of a trained DAMEX they cost 0.01 AP.)
    Without any of the options each token chooses among all experts.

    Attributes:
        teacher_forcing: In training the dataset of the image chooses the group, where
            it is known. Losses see the logits of all experts, so the router learns as
            it would without.
        image_vote: In evaluation the tokens of an image choose one group together: that
            with the largest sum over tokens of the log-probability of its experts, in
            this layer and those computed before.
        oracle: In evaluation the dataset of the image chooses, whatever `image_vote`
            says. For analysis: users do not know it.
    """

    teacher_forcing: bool = False
    image_vote: bool = False
    oracle: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that are on."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name))

    def chooser(self, *, training: bool) -> Literal["token", "image", "dataset"]:
        """Who chooses the group; 'token' where nobody does and all experts are open.

        Args:
            training: Whether the layer is in training or in evaluation.
        """
        if training:
            return "dataset" if self.teacher_forcing else "token"
        if self.oracle:
            return "dataset"
        return "image" if self.image_vote else "token"


def allowed_experts(group_ids_V: Tensor, group_experts_GE: Tensor) -> Tensor:
    """The experts of each row's group.

    Args:
        group_ids_V: int64, -1 for a row that is free to go to any.
        group_experts_GE: bool, the experts of each group.

    Returns:
        allowed_VE: bool.
    """
    # The host need not know which rows are free.
    free_V1 = (group_ids_V < 0).unsqueeze(1)
    return group_experts_GE[group_ids_V.clamp_min(0)] | free_V1


def restrict(scores_VE: Tensor, allowed_VE: Tensor) -> Tensor:
    """Scores by which no other than the allowed experts come first.

    Args:
        scores_VE: Router logits, or what experts are chosen by.
        allowed_VE: bool, at least one expert per row.

    Returns:
        scores_VE: Minus infinity where not allowed, without gradient there.
    """
    return scores_VE.masked_fill(~allowed_VE, -torch.inf)


@torch.no_grad()
def image_votes(
    logits_VE: Tensor, group_experts_GE: Tensor, packing: Packing
) -> Tensor:
    """Log-probability of each group's experts, summed over the tokens of each image.

    A sum of logarithms lets a sure token outweigh unsure ones, where a majority would
    not: it is the log-likelihood of the group, were tokens independent.

    Args:
        logits_VE: Router logits of the real tokens.
        group_experts_GE: bool, the experts of each group.
        packing: To which image each token belongs.

    Returns:
        votes_BG: float64, so that padding and the other images of a batch, which change
        the order of the sum, do not change who wins.
    """
    log_prob_V1E = torch.log_softmax(logits_VE.double(), dim=1).unsqueeze(1)
    own_VGE = log_prob_V1E.masked_fill(~group_experts_GE, -torch.inf)
    return packing.unpack(torch.logsumexp(own_VGE, dim=2)).sum(1)


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
