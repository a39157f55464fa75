"""From router logits to a scalar: the steps that routing losses share.

Axes: B images, N tokens per image, T = B*N tokens, V valid tokens, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from damex.moe.protocols import Gate
from damex.moe.routing import Assignment, RoutingRecord


def valid_logits(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """Picks the rows of valid tokens, in float32 or wider.

    Rows are taken out, not multiplied by zero: a sum over the rest then does not depend
    on how many padded rows there were, and a NaN in one of them cannot leak into
    gradients.

    Args:
        logits_TE: Router logits.
        valid_T: True for tokens that count; None for all of them.

    Returns:
        logits_VE: At least float32.
    """
    if valid_T is not None:
        logits_TE = logits_TE[valid_T]
    return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))


def mean_over_tokens(values_V: Tensor) -> Tensor:
    """The mean, or a zero that is attached to the graph when there is no token."""
    return values_V.sum() / max(values_V.shape[0], 1)


def squared_cv(values_E: Tensor) -> Tensor:
    """Squared coefficient of variation, Var / (Mean^2 + 1e-10).

    The variance is the population one, as in V-MoE, so one expert gives 0. (Tutel, and
    with it DAMEX, divides by E - 1.)
    """
    variance = values_E.var(correction=0)
    return variance / (values_E.mean().square() + 1e-10)


def record_groups(record: RoutingRecord, *, owner: str) -> tuple[Tensor, Tensor]:
    """Group of every token and experts of every group.

    Args:
        record: Record of one forward.
        owner: The loss, for the message.

    Returns:
        group_ids_T: -1 where unknown.
        group_experts_GE: True where a group may use an expert.

    Raises:
        ValueError: If the record lacks one of them.
    """
    if record.group_ids_T is None or record.group_experts_GE is None:
        raise ValueError(
            f"{owner}: the routing record needs group_ids_T and group_experts_GE; give "
            "the layer group_experts and its forward group_ids_B"
        )
    return record.group_ids_T, record.group_experts_GE


TokenChoice = Literal["all", "foreground"]


def check_tokens(owner: str, tokens: str) -> None:
    """Raises ValueError, naming the loss, unless the choice is known."""
    if tokens not in get_args(TokenChoice):
        raise ValueError(
            f"{owner}: unknown tokens {tokens!r}; use one of {get_args(TokenChoice)}"
        )


def counted_tokens(
    record: RoutingRecord, tokens: TokenChoice, *, owner: str
) -> Tensor | None:
    """Mask of the real tokens that a loss counts.

    Args:
        record: Record of one forward.
        tokens: 'all' for all real tokens, 'foreground' for those on objects.
        owner: The loss, for the message.

    Returns:
        valid_T: None where all tokens count.

    Raises:
        ValueError: If the foreground is asked for and the record does not know it.
    """
    if tokens == "all":
        return record.token_mask_T
    if record.foreground_T is None:
        raise ValueError(
            f"{owner}: tokens='foreground' needs foreground_T in the routing record; "
            "give the layer's forward foreground_BN, or set tokens='all'"
        )
    return record.foreground_T & record.valid_mask()


def dataset_routing_loss(
    logits_TE: Tensor, target_mask_TE: Tensor, valid_T: Tensor | None = None
) -> Tensor:
    """Mean of -log(sum of the probabilities of a token's allowed experts).

    With one allowed expert this is the cross-entropy of DAMEX (NeurIPS 2023, arXiv
    2311.04894), L = (1/T) sum_t -log softmax(z_t)[h(d(t))]; several allowed experts
    may share a dataset's tokens as they like.

    Args:
        logits_TE: Clean router logits.
        target_mask_TE: True at the allowed experts. A row without any takes no part:
            its dataset is unknown.
        valid_T: True for tokens that count; None for all of them.

    Returns:
        A scalar in nats, 0 when no token takes part.
    """
    logits_VE = valid_logits(logits_TE, valid_T)
    if valid_T is not None:
        target_mask_TE = target_mask_TE[valid_T]
    known_V = target_mask_TE.any(dim=1)
    # A row of unknown dataset is allowed everything: its loss and gradient are 0, and
    # the host need not know which rows those are.
    allowed_VE = target_mask_TE | ~known_V.unsqueeze(1)
    log_all_V = torch.logsumexp(logits_VE, dim=1)
    log_allowed_V = torch.logsumexp(
        logits_VE.masked_fill(~allowed_VE, -torch.inf), dim=1
    )
    return (log_all_V - log_allowed_V).sum() / known_V.sum().clamp_min(1)


@dataclass(frozen=True, kw_only=True)
class DatasetRoutingLoss:
    """`dataset_routing_loss` on the record of a layer.

    Attributes:
        weight: Factor in the total loss; 0.1 in DAMEX.
        tokens: 'all' for all real tokens, 'foreground' for those on objects.
        name: Key of the loss.
    """

    needs_groups: ClassVar[bool] = True

    weight: float = 0.1
    tokens: TokenChoice = "all"
    name: str = "dataset_routing"

    def __post_init__(self) -> None:
        check_tokens("DatasetRoutingLoss", self.tokens)

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss; tokens with group id -1 are left out.

        Raises:
            ValueError: If the record has no group ids, no group-expert map, or no
                foreground where that is asked for.
        """
        ids_T, experts_GE = record_groups(record, owner="DatasetRoutingLoss")
        known_T = ids_T >= 0
        target_TE = experts_GE[ids_T.clamp_min(0)]
        valid_T = counted_tokens(record, self.tokens, owner="DatasetRoutingLoss")
        return dataset_routing_loss(
            record.logits_TE, target_TE & known_T.unsqueeze(1), valid_T
        )


def importance_loss(logits_TE: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """CV^2 over experts of I_e = sum_t p_te (arXiv 1701.06538, eq. 6-7; V-MoE).

    Args:
        logits_TE: Clean router logits.
        valid_T: True for tokens that count; None for all of them.

    Returns:
        A scalar: 0 when balanced or without valid tokens, E - 1 when one expert has
        all the probability.
    """
    probs_VE = torch.softmax(valid_logits(logits_TE, valid_T), dim=1)
    return squared_cv(probs_VE.sum(0))


@dataclass(frozen=True, kw_only=True)
class ImportanceLoss:
    """`importance_loss` on the record of a layer.

    Attributes:
        weight: Factor in the total loss. DAMEX's vanilla MoE baseline weights the mean
            of importance and load by 0.1, so 0.05 each, on foreground tokens.
        tokens: 'all' for all real tokens, 'foreground' for those on objects.
        name: Key of the loss.
    """

    needs_groups: ClassVar[bool] = False

    weight: float = 0.05
    tokens: TokenChoice = "all"
    name: str = "importance"

    def __post_init__(self) -> None:
        check_tokens("ImportanceLoss", self.tokens)

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss.

        Raises:
            ValueError: If the record lacks a foreground that is asked for.
        """
        valid_T = counted_tokens(record, self.tokens, owner="ImportanceLoss")
        return importance_loss(record.logits_TE, valid_T)


def load_loss(
    logits_TE: Tensor, valid_T: Tensor | None = None, *, k: int, noise_std: float
) -> Tensor:
    """CV^2 over experts of Load_e = sum_t Phi((z_te - thr_t) / noise_std).

    Phi is the normal distribution function and thr_t the k-th largest logit of the
    token, so each term is the chance that fresh gaussian noise on expert e lifts it
    to the token's threshold (arXiv 1701.06538, eq. 8-11). Logits are compared with
    logits; Tutel, and with it DAMEX, compares probabilities with a logit.

    Args:
        logits_TE: Clean router logits.
        valid_T: True for tokens that count; None for all of them.
        k: Experts per token.
        noise_std: Standard deviation of the gate's noise, above 0.

    Returns:
        A scalar, 0 when balanced or without valid tokens.

    Raises:
        ValueError: If k is not in [1, E] or `noise_std` is not positive.
    """
    num_experts = logits_TE.shape[1]
    if not 1 <= k <= num_experts:
        raise ValueError(f"load_loss: k must lie in [1, E={num_experts}], got {k}")
    if not noise_std > 0.0:
        raise ValueError(f"load_loss: noise_std must be above 0, got {noise_std}")
    logits_VE = valid_logits(logits_TE, valid_T)
    threshold_V1 = torch.topk(logits_VE, k, dim=1).values[:, -1:]
    chance_VE = torch.special.ndtr((logits_VE - threshold_V1) / noise_std)
    return squared_cv(chance_VE.sum(0))


@dataclass(frozen=True, kw_only=True)
class LoadLoss:
    """`load_loss` on the record of a layer with a fixed number of routes per token.

    Attributes:
        weight: Factor in the total loss; see `ImportanceLoss.weight`.
        noise_std: The gaussian noise scale of the gate; None stands for 1/E, as in
            `TopKGate`.
        tokens: 'all' for all real tokens, 'foreground' for those on objects.
        name: Key of the loss.
    """

    needs_groups: ClassVar[bool] = False

    weight: float = 0.05
    noise_std: float | None = None
    tokens: TokenChoice = "all"
    name: str = "load"

    def __post_init__(self) -> None:
        check_tokens("LoadLoss", self.tokens)

    def check_layer(self, *, gate: Gate, num_groups: int | None) -> None:
        """Refuses a gate that gives tokens different numbers of experts.

        Args:
            gate: The layer's gate.
            num_groups: Not read.

        Raises:
            ValueError: If the gate says that its number of routes is not fixed.
        """
        del num_groups
        if not getattr(gate, "has_fixed_routes", True):
            raise ValueError(_misfit(type(gate).__name__))

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss.

        Raises:
            ValueError: If tokens differ in their number of routes, or the record lacks
                a foreground that is asked for.
        """
        k = record.assignment.routes_per_token
        if k is None:
            raise ValueError(_misfit("different numbers"))
        std = 1.0 / record.num_experts if self.noise_std is None else self.noise_std
        valid_T = counted_tokens(record, self.tokens, owner="LoadLoss")
        return load_loss(record.logits_TE, valid_T, k=k, noise_std=std)


def _misfit(got: str) -> str:
    return (
        "LoadLoss: needs a gate that gives every token the same number of experts, "
        f"such as TopKGate (with k above 1, without a capacity), got {got}; use "
        "LoadBalanceLoss or ImportanceLoss"
    )


SCORES = ("probability", "logit")


def load_balance_loss(
    logits_TE: Tensor,
    counts_E: Tensor,
    valid_T: Tensor | None = None,
    *,
    scores: Literal["probability", "logit"] = "probability",
) -> Tensor:
    """E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961, eq. 4-6).

    f_e is the share of all routes that go to expert e (no gradient), P_e the mean
    probability of e. The value is 1 when either of them is uniform, and E when
    everything goes to one expert. (1 is where descent leads, not a bound: f and P that
    disagree can give less.)

    Args:
        logits_TE: Clean router logits.
        counts_E: Routes of each expert.
        valid_T: True for tokens that count; None for all of them.
        scores: 'logit' for the mean logit in the place of P_e, as in the released code
            of Chen et al. 2022 for synthetic data; there is no lower bound then.

    Returns:
        A scalar, 0 when there is no valid token.
    """
    scores_VE = valid_logits(logits_TE, valid_T)
    if scores == "probability":
        scores_VE = torch.softmax(scores_VE, dim=1)
    score_E = scores_VE.sum(0) / max(scores_VE.shape[0], 1)
    fraction_E = counts_E.to(score_E.dtype) / counts_E.sum().clamp_min(1)
    return counts_E.shape[0] * (fraction_E * score_E).sum()


@dataclass(frozen=True, kw_only=True)
class LoadBalanceLoss:
    """`load_balance_loss` on the record of a layer.

    It acts on gates whose load can be uneven. Where each expert has the same load, it
    is 1 whatever the router says and has no gradient (with scores='logit' it does not
    even out anything either): with `DenseSoftmaxGate`; with `ExpertChoiceGate`, unless
    tokens='foreground'; and with `DenseToSparseGate` as long as it drops no weight.

    Attributes:
        weight: Factor in the total loss; 0.01 in Switch Transformer.
        tokens: 'all' for all real tokens, 'foreground' for those on objects.
        name: Key of the loss.
        scores: See `load_balance_loss`.
    """

    needs_groups: ClassVar[bool] = False

    weight: float = 0.01
    tokens: TokenChoice = "all"
    name: str = "load_balance"
    scores: Literal["probability", "logit"] = "probability"

    def __post_init__(self) -> None:
        check_tokens("LoadBalanceLoss", self.tokens)
        if self.scores not in SCORES:
            raise ValueError(
                f"LoadBalanceLoss: unknown scores {self.scores!r}; use one of {SCORES}"
            )

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss; routes that found no place count as well.

        Raises:
            ValueError: If the record lacks a foreground that is asked for.
        """
        valid_T = counted_tokens(record, self.tokens, owner="LoadBalanceLoss")
        counts_E = _counts(record.assignment, valid_T)
        if record.assignment.dropped is not None:
            counts_E = counts_E + _counts(record.assignment.dropped, valid_T)
        return load_balance_loss(
            record.logits_TE, counts_E, valid_T, scores=self.scores
        )


def _counts(routes: Assignment, valid_T: Tensor | None) -> Tensor:
    """Routes of each expert that start at counted tokens."""
    if valid_T is None:
        return routes.counts_E
    counted_R = valid_T.index_select(0, routes.token_index_R).to(routes.counts_E.dtype)
    zeros_E = torch.zeros_like(routes.counts_E)
    return zeros_E.scatter_add(0, routes.expert_index_R, counted_R)


def router_z_loss(logits_TE: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """Mean over tokens of logsumexp(z_t)^2 (ST-MoE, arXiv 2202.08906, eq. 5).

    Keeps logits small, so that rounding matters less.

    Args:
        logits_TE: Clean router logits.
        valid_T: True for tokens that count; None for all of them.

    Returns:
        A scalar, 0 when there is no valid token.
    """
    logits_VE = valid_logits(logits_TE, valid_T)
    return mean_over_tokens(torch.logsumexp(logits_VE, dim=1).square())


@dataclass(frozen=True, kw_only=True)
class RouterZLoss:
    """`router_z_loss` on the record of a layer.

    Attributes:
        weight: Factor in the total loss; 0.001 in ST-MoE.
        name: Key of the loss.
    """

    needs_groups: ClassVar[bool] = False

    weight: float = 0.001
    name: str = "router_z"

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Returns the unweighted loss."""
        return router_z_loss(record.logits_TE, record.token_mask_T)


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
