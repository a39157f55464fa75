"""Losses on the routing of a layer: scalars, zero with a graph if no token counts.

Axes: V tokens that count, E experts, G dataset groups, P pairs of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from damex.errors import check_choice, check_number
from damex.moe.gates import Gate
from damex.moe.routing import Assignment, RoutingRecord, allowed_experts, restrict

TokenChoice = Literal["all", "foreground"]


@dataclass(frozen=True, kw_only=True)
class RoutingLoss:
    """Base class of training losses on the routing of one layer.

    A subclass sets the defaults of `weight` (0 or more, applied by the layer) and
    `name` (unique within a layer) and implements `compute`. `tokens` is 'all', or
    'foreground' for those on objects; `needs_groups`, whether the loss reads dataset
    groups.
    """

    needs_groups: ClassVar[bool] = False
    weight: float
    name: str
    tokens: TokenChoice = "all"

    def __post_init__(self) -> None:
        check_choice(type(self).__name__, get_args(TokenChoice), tokens=self.tokens)

    def check_layer(self, *, gate: Gate, num_groups: int | None) -> None:
        """Raise ValueError for a layer that the loss does not support.

        `num_groups` is None without a group-expert map.
        """
        check_number(f"loss {self.name!r}", ">= 0", weight=self.weight)
        if self.needs_groups and num_groups is None:
            raise ValueError(
                f"loss {self.name!r} needs group_experts, the experts of each dataset "
                "group, e.g. group_experts=[[0], [1]] for two datasets"
            )

    def __call__(self, record: RoutingRecord) -> Tensor:
        """Return the unweighted loss of one forward pass.

        Raises ValueError if the record lacks what the loss reads.
        """
        dtype = torch.promote_types(record.logits_VE.dtype, torch.float32)
        logits_VE = record.logits_VE.to(dtype)
        if self.tokens == "all":
            return self.compute(logits_VE, record, None)
        if record.foreground_V is None:
            raise ValueError(
                f"{type(self).__name__}: tokens='foreground' needs foreground_V in the "
                "routing record; give the layer's forward foreground_BN, or set "
                "tokens='all'"
            )
        index_V = record.foreground_V.nonzero().squeeze(1)
        return self.compute(logits_VE.index_select(0, index_V), record, index_V)

    def compute(
        self, logits_VE: Tensor, record: RoutingRecord, index_V: Tensor | None
    ) -> Tensor:
        """Compute the unweighted loss.

        `logits_VE` are clean, float32 or wider, and of the tokens that count; `index_V`
        are their indices in the record, None for all.
        """
        raise NotImplementedError

    def _groups(
        self, record: RoutingRecord, index_V: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the groups of tokens that count and the experts of groups."""
        ids_V, experts_GE = record.groups(type(self).__name__)
        if index_V is not None:
            ids_V = ids_V.index_select(0, index_V)
        return ids_V, experts_GE


@dataclass(frozen=True, kw_only=True)
class DatasetRoutingLoss(RoutingLoss):
    """Mean of -log(probability of the experts of a token's group), in nats.

    With one expert per group it is the cross-entropy of DAMEX (NeurIPS 2023, arXiv
    2311.04894), L = (1/V) sum_v -log softmax(z_v)[h(d(v))]; several experts may divide
    the tokens of a group freely. Tokens of unknown group are ignored. The weight in
    DAMEX is 0.1.
    """

    needs_groups: ClassVar[bool] = True

    weight: float = 0.1
    name: str = "dataset_routing"

    def compute(
        self, logits_VE: Tensor, record: RoutingRecord, index_V: Tensor | None
    ) -> Tensor:
        """Compute the loss, see the base class."""
        ids_V, experts_GE = self._groups(record, index_V)
        known_V = ids_V >= 0
        # All experts are allowed for an unknown group: loss and gradient are 0.
        allowed_VE = allowed_experts(ids_V, experts_GE)
        log_all_V = torch.logsumexp(logits_VE, dim=1)
        # -log sum_(e in h(d)) p_e = logsumexp of all logits - that of those in h(d).
        log_allowed_V = torch.logsumexp(restrict(logits_VE, allowed_VE), dim=1)
        return (log_all_V - log_allowed_V).sum() / known_V.sum().clamp_min(1)


@dataclass(frozen=True, kw_only=True)
class ImportanceLoss(RoutingLoss):
    """CV^2 over experts of I_e = sum_v p_ve (arXiv 1701.06538, eq. 6-7; V-MoE).

    0 when balanced, E - 1 when one expert has all the probability. The vanilla MoE
    baseline of DAMEX weights the mean of importance and load by 0.1, so 0.05 each, on
    foreground tokens.
    """

    weight: float = 0.05
    name: str = "importance"

    def compute(
        self, logits_VE: Tensor, record: RoutingRecord, index_V: Tensor | None
    ) -> Tensor:
        """Compute the loss, see the base class."""
        # Shazeer et al. 2017: Importance_e = sum_v p_ve.
        return _squared_cv(torch.softmax(logits_VE, dim=1).sum(0))


@dataclass(frozen=True, kw_only=True)
class LoadLoss(RoutingLoss):
    """CV^2 over experts of Load_e = sum_v Phi((z_ve - thr_v) / noise_std).

    Phi is the normal distribution function and thr_v the k-th largest logit of the
    token: each term is the chance that new gaussian noise lifts expert e to the token's
    threshold (arXiv 1701.06538, eq. 8-11). Logits are compared with logits, whereas
    Tutel and DAMEX compare probabilities with a logit. `noise_std` is that of the gate,
    by default 1/E as in `TopKGate`; the gate must give all tokens the same number k of
    experts.
    """

    weight: float = 0.05
    name: str = "load"
    noise_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("LoadLoss", "above 0", noise_std=self.noise_std)

    def check_layer(self, *, gate: Gate, num_groups: int | None) -> None:
        """Reject a gate with a varying number of experts per token as well."""
        super().check_layer(gate=gate, num_groups=num_groups)
        if not gate.has_fixed_routes:
            raise ValueError(
                "LoadLoss: needs a gate that gives every token the same number of "
                f"experts, got {type(gate).__name__}; use TopKGate without a capacity, "
                "or LoadBalanceLoss or ImportanceLoss"
            )
        noise, scale = getattr(gate, "noise", None), getattr(gate, "noise_scale", None)
        if noise == "uniform" or scale == 0:
            raise ValueError("LoadLoss: the gate needs noise='gaussian', above 0")
        if noise is not None and scale != self.noise_std:
            raise ValueError(
                f"LoadLoss: noise_std={self.noise_std} and noise_scale={scale} of the "
                "gate differ; leave both out (1/E), or set both to one number"
            )

    def compute(
        self, logits_VE: Tensor, record: RoutingRecord, index_V: Tensor | None
    ) -> Tensor:
        """Compute the loss, see the base class."""
        k = record.assignment.routes_per_token
        if k is None:
            raise ValueError("LoadLoss: needs the same number of experts per token")
        std = self.noise_std or 1.0 / record.num_experts
        threshold_V1 = torch.topk(logits_VE, k, dim=1).values[:, -1:]
        # Shazeer et al. 2017: P(v, e) = Phi(distance to the k-th largest / std). Theirs
        # leaves e itself out of the k; with it, as in Tutel, a k-th choice counts 1/2.
        chance_VE = torch.special.ndtr((logits_VE - threshold_V1) / std)
        return _squared_cv(chance_VE.sum(0))


@dataclass(frozen=True, kw_only=True)
class LoadBalanceLoss(RoutingLoss):
    """E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961, eq. 4-6; weight 0.01).

    f_e is the share of routes to expert e, including those beyond its capacity (no
    gradient), P_e the mean probability of e. 1 when either is uniform, E when
    everything goes to one expert, below 1 when they disagree. Constant, without
    gradient, for equal loads: with `DenseSoftmaxGate`, `ExpertChoiceGate` (unless
    tokens='foreground') and `DenseToSparseGate` as long as it drops no weight.
    """

    weight: float = 0.01
    name: str = "load_balance"

    def compute(
        self, logits_VE: Tensor, record: RoutingRecord, index_V: Tensor | None
    ) -> Tensor:
        """Compute the loss, see the base class."""
        routes = record.assignment
        counted_V = None if index_V is None else record.foreground_V
        counts_E = _counts(routes, counted_V)
        if routes.dropped is not None:
            counts_E = counts_E + _counts(routes.dropped, counted_V)
        prob_E = torch.softmax(logits_VE, dim=1).sum(0) / max(logits_VE.shape[0], 1)
        # Switch Transformer: E * sum_e f_e P_e.
        fraction_E = counts_E.to(prob_E.dtype) / counts_E.sum().clamp_min(1)
        return counts_E.shape[0] * (fraction_E * prob_E).sum()


def _counts(routes: Assignment, counted_V: Tensor | None) -> Tensor:
    """Count the routes of each expert that start at tokens that count."""
    if counted_V is None:
        return routes.counts_E
    counts_R = counted_V.index_select(0, routes.token_index_R)
    zeros_E = torch.zeros_like(routes.counts_E)
    return zeros_E.scatter_add(0, routes.expert_index_R, counts_R.to(zeros_E.dtype))


@dataclass(frozen=True, kw_only=True)
class RouterZLoss(RoutingLoss):
    """Mean over tokens of logsumexp(z_v)^2 (ST-MoE, arXiv 2202.08906, eq. 5).

    Keeps logits small, so that rounding matters less. The weight in ST-MoE is 0.001.
    """

    weight: float = 0.001
    name: str = "router_z"

    def compute(
        self, logits_VE: Tensor, record: RoutingRecord, index_V: Tensor | None
    ) -> Tensor:
        """Compute the loss, see the base class."""
        # ST-MoE: (log sum_e exp z_e)^2.
        squares_V = torch.logsumexp(logits_VE, dim=1).square()
        return squares_V.sum() / max(len(squares_V), 1)


@dataclass(frozen=True, kw_only=True)
class SeparateRouterLoss(RoutingLoss):
    """Eq. 6 of pMoE (Chowdhury et al., ICML 2023, arXiv 2306.04073) per token.

    For two dataset groups, with y = +1 for group 0 and -1 for group 1 and router logits
    <w_g, x_v>, it is the mean of -y_v <w_0 - w_1, x_v> over the V tokens; for more, the
    mean over all pairs (a, b) of that on the tokens of a and b. The logit of a group is
    the mean over its experts; tokens of unknown group are ignored.

    It is linear in the logits and has no minimum: gradient descent of a linear router
    moves w_0 - w_1 along the difference of the group means, so train for a fixed number
    of steps and then freeze the router.
    """

    needs_groups: ClassVar[bool] = True

    weight: float = 1.0
    name: str = "separate_router"

    def check_layer(self, *, gate: Gate, num_groups: int | None) -> None:
        """Reject a single group as well."""
        super().check_layer(gate=gate, num_groups=num_groups)
        if num_groups == 1:
            raise ValueError(
                "SeparateRouterLoss: parts dataset groups and needs two or more, got 1"
            )

    def compute(
        self, logits_VE: Tensor, record: RoutingRecord, index_V: Tensor | None
    ) -> Tensor:
        """Compute the loss, see the base class."""
        ids_V, experts_GE = self._groups(record, index_V)
        num_groups = experts_GE.shape[0]
        mask_GE = experts_GE.to(logits_VE.dtype)
        mean_GE = mask_GE / mask_GE.sum(1, keepdim=True)
        known_V1 = (ids_V >= 0).unsqueeze(1)
        own_VG = functional.one_hot(ids_V.clamp_min(0), num_groups) * known_V1
        # In half precision a sum over many tokens overflows.
        with torch.autocast(logits_VE.device.type, enabled=False):
            # sums_GG[a, b]: logits of group b, summed over the tokens of group a.
            sums_GG = own_VG.to(logits_VE.dtype).t() @ (logits_VE @ mean_GE.t())
        count_G = own_VG.sum(0)
        first, second = torch.triu_indices(num_groups, num_groups, 1)
        # pMoE, eq. 6: y <w_1 - w_2, x>, with y = +1 on group a and -1 on group b.
        gain_P = sums_GG[first, first] - sums_GG[first, second]
        gain_P = gain_P + sums_GG[second, second] - sums_GG[second, first]
        count_P = (count_G[first] + count_G[second]).clamp_min(1)
        # pMoE, eq. 6: the minus and 1/N.
        return -(gain_P / count_P).mean()


def _squared_cv(values_E: Tensor) -> Tensor:
    """Return the squared coefficient of variation, Var / (Mean^2 + 1e-10).

    The population variance, as in V-MoE, gives 0 for one expert; Tutel and DAMEX divide
    by E - 1.
    """
    variance = values_E.var(correction=0)
    return variance / (values_E.mean().square() + 1e-10)
