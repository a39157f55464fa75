"""pMoE's loss for a router that is trained on its own, before the experts.

Axes: T tokens, V tokens that count, E experts, G classes (dataset groups).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from damex.moe.losses.record_groups import record_groups
from damex.moe.losses.reductions import valid_logits
from damex.moe.protocols import Gate
from damex.moe.record import RoutingRecord


def separate_router_loss(
    logits_TG: Tensor,
    labels_T: Tensor,
    valid_T: Tensor | None = None,
    *,
    tokens_per_sample: int = 1,
    pairs: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Eq. 6 of pMoE (Chowdhury et al., ICML 2023, arXiv 2306.04073), token by token.

    For two classes, with y = +1 for class 0 and -1 for class 1 and router logits
    <w_s, x_j>, it is -(1/N) sum_i y_i <w_0 - w_1, sum_j x_ij> over N samples i with
    `tokens_per_sample` tokens j each. For more classes it is the mean over pairs (a, b)
    of eq. 6 on the samples of a and b alone.

    It is linear in the logits and has no minimum: gradient descent of a linear router
    moves w_0 - w_1 straight along the difference of the class means, so train for a
    chosen number of steps and then freeze the router.

    Args:
        logits_TG: Router logits, one per class.
        labels_T: Class of each token's sample, -1 where unknown.
        valid_T: True for tokens that count; None for all of them.
        tokens_per_sample: n. 1 gives the mean over tokens, which does not depend on the
            number of tokens of a sample.
        pairs: Pairs of classes to part; None for all of them.

    Returns:
        A scalar; 0 when no token takes part.

    Raises:
        ValueError: If there are fewer than two classes or a pair is none.
    """
    num_classes = logits_TG.shape[1]
    logits_VG = valid_logits(logits_TG, valid_T)
    labels_V = labels_T if valid_T is None else labels_T[valid_T]
    known_V1 = (labels_V >= 0).unsqueeze(1)
    own_VG = torch.nn.functional.one_hot(labels_V.clamp_min(0), num_classes) * known_V1
    # sums_GG[a, b]: logits of class b, summed over the tokens of class a.
    # In autocast's half precision a sum over many tokens would overflow.
    with torch.autocast(logits_VG.device.type, enabled=False):
        sums_GG = own_VG.to(logits_VG.dtype).t() @ logits_VG
    count_G = own_VG.sum(0)
    first, second = _pairs(pairs, num_classes)
    gain_P = sums_GG[first, first] - sums_GG[first, second]
    gain_P = gain_P + sums_GG[second, second] - sums_GG[second, first]
    count_P = (count_G[first] + count_G[second]).clamp_min(1)
    return -tokens_per_sample * (gain_P / count_P).mean()


@dataclass(frozen=True, kw_only=True)
class SeparateRouterLoss:
    """`separate_router_loss` on the record of a layer; classes are dataset groups.

    The logit of a group is the mean over its experts.

    Attributes:
        weight: Factor in the total loss.
        pairs: Pairs of groups to part; None for all of them.
        name: Key of the loss.

    Raises:
        ValueError: If `pairs` are no pairs of two different groups.
    """

    needs_groups: ClassVar[bool] = True

    weight: float = 1.0
    pairs: Sequence[tuple[int, int]] | None = None
    name: str = "separate_router"

    def __post_init__(self) -> None:
        _check_pairs("SeparateRouterLoss", self.pairs)

    def check_layer(self, *, gate: Gate, num_groups: int | None) -> None:
        """Refuses pairs of groups that the layer does not have.

        Args:
            gate: Not read.
            num_groups: Number of dataset groups.

        Raises:
            ValueError: If a pair names another group.
        """
        del gate
        _check_pairs("SeparateRouterLoss", self.pairs, num_classes=num_groups)

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss; tokens with group id -1 are left out.

        Raises:
            ValueError: If the record has no group ids or no group-expert map, or there
                are fewer than two groups.
        """
        ids_T, experts_GE = record_groups(record, owner="SeparateRouterLoss")
        logits_TE = valid_logits(record.logits_TE, None)
        mask_GE = experts_GE.to(logits_TE.dtype)
        mean_GE = mask_GE / mask_GE.sum(1, keepdim=True)
        with torch.autocast(logits_TE.device.type, enabled=False):
            logits_TG = logits_TE @ mean_GE.t()
        return separate_router_loss(
            logits_TG,
            ids_T,
            record.token_mask_T,
            pairs=self.pairs,
        )


def _pairs(
    pairs: Sequence[tuple[int, int]] | None, num_classes: int
) -> tuple[list[int], list[int]]:
    """First and second classes of all pairs."""
    if num_classes < 2:
        raise ValueError(
            f"separate_router_loss: needs two classes or more, got {num_classes}"
        )
    if pairs is None:
        pairs = [(a, b) for a in range(num_classes) for b in range(a + 1, num_classes)]
    _check_pairs("separate_router_loss", pairs, num_classes=num_classes)
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _check_pairs(owner: str, pairs: Any, *, num_classes: int | None = None) -> None:
    """Raises ValueError, naming the owner, unless these are pairs of known classes."""
    if pairs is None:
        return
    if not isinstance(pairs, Sequence) or isinstance(pairs, str) or not pairs:
        raise ValueError(
            f"{owner}: pairs must be a list of pairs such as [(0, 1)], not empty, or "
            f"None for all, got {pairs!r}"
        )
    end = sys.maxsize if num_classes is None else num_classes
    known = "[0, G)" if num_classes is None else f"[0, {num_classes})"
    for pair in pairs:
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        inside = is_pair and all(type(n) is int and 0 <= n < end for n in pair)
        if not inside or pair[0] == pair[1]:
            raise ValueError(
                f"{owner}: pairs must name two different classes in {known}, "
                f"got {pair!r}"
            )
