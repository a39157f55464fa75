"""Gates: the base class, and top-k with a capacity or a balancing bias.

Axes: V real tokens, E experts, K experts per token, R routes (token-expert pairs).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, distributed, nn

from damex.errors import check_choice, check_number, check_sizes
from damex.moe.routing import Assignment, GroupChoice, Packing, restrict


class Gate(nn.Module):
    """Turns router logits into routes.

    A subclass implements `forward`, which must be deterministic in evaluation. A
    repeated forward pass must make the same choices, or activation recomputation
    would be wrong: state changes in `begin_step` and `end_step`, called
    by the trainer before and after every forward pass in training.
    """

    compares_tokens: ClassVar[bool] = False
    """Whether the experts of a token depend on the other tokens of its image."""

    @property
    def has_fixed_routes(self) -> bool:
        """Whether all routed tokens get the same number of experts."""
        return True

    @property
    def has_constant_weights(self) -> bool:
        """Whether weights are always 1, so that the output teaches no router."""
        return False

    def has_even_load(self, tokens: str) -> bool:
        """Whether experts always get equally many of 'all' or 'foreground' tokens."""
        return False

    def check_group_choice(self, choice: GroupChoice, *, smallest: int) -> None:
        """Reject a restriction to one group's experts; called when a layer is built.

        `smallest` is the size of the smallest group. A subclass that supports it
        overrides this, and its `forward` takes `allowed_VE`: bool, at least one expert
        per token, None for all. It restricts the choice and does not change the
        weights.
        """
        raise ValueError(
            f"{type(self).__name__} does not keep a token to the experts of one group "
            f"and cannot be combined with {' and '.join(choice.options)}; use "
            "TopKGate, or leave the option out"
        )

    def begin_step(self, progress: float | None) -> None:
        """Begin a training step at a share of the training in [0, 1], if known."""

    def end_step(self) -> None:
        """End a training step: its counts are complete."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Return a context whose tokens change no state of the gate."""
        return nullcontext()

    def forward(self, logits_VE: Tensor, packing: Packing | None = None) -> Assignment:
        """Choose the routes; without a packing all tokens belong to one image."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ExpertCapacity:
    """Limits every expert to k * int(factor * ceil(V / E)) routes per forward pass.

    This is the arithmetic of Tutel 0.2.1 and released DAMEX; V counts the real tokens
    of the whole batch. Routes beyond it are moved to `Assignment.dropped`; a token
    without routes passes the layer on its residual only. First choices of all tokens
    are served before second ones, and of these the tokens with the highest probability
    of their first choice (batch-priority routing of V-MoE, arXiv 2106.05974).

    Also in evaluation, where no other option makes the result of an image depend on the
    other images of its batch. Queries of a decoder share it regardless of their
    attention mask: in training the denoising queries of DINO, made from the ground
    truth, take capacity from the matching queries, as in released DAMEX.
    """

    factor: float = 1.25

    def __post_init__(self) -> None:
        check_number("ExpertCapacity", "above 0", factor=self.factor)

    def capacity(self, num_tokens: int, num_experts: int, *, k: int) -> int:
        """Return the largest number of routes of each expert."""
        # 900 tokens, 8 experts and a factor of 1.25 give 141, as in released DAMEX.
        return k * int(self.factor * -(-num_tokens // num_experts))

    def apply(
        self, assignment: Assignment, ids_VK: Tensor, probs_VE: Tensor
    ) -> Assignment:
        """Drop the routes beyond the capacity of their expert.

        `ids_VK` are the experts of each token, best first; the probabilities set the
        order of service, without gradient.
        """
        k = ids_VK.shape[1]
        tokens_R, experts_R = assignment.token_index_R, assignment.expert_index_R
        num_tokens = assignment.num_routes // k
        capacity = self.capacity(num_tokens, assignment.num_experts, k=k)
        is_choice_RK = ids_VK.index_select(0, tokens_R) == experts_R.unsqueeze(1)
        # Routes come sorted by expert and token. Stable sorts, from the last key to the
        # first, put them in the order of service: expert, choice, score, token.
        first_V = probs_VE.detach().gather(1, ids_VK[:, :1]).squeeze(1)
        score_R = first_V.index_select(0, tokens_R)
        order_R = torch.argsort(score_R, descending=True, stable=True)
        for key_R in (is_choice_RK.int().argmax(1), experts_R):
            step_R = torch.argsort(key_R.index_select(0, order_R), stable=True)
            order_R = order_R.index_select(0, step_R)
        counts_E = assignment.counts_E
        start_E = counts_E.cumsum(0) - counts_E
        rank_R = torch.arange(len(order_R), device=order_R.device)
        rank_R = rank_R - start_E.index_select(0, experts_R)
        served_R = torch.zeros_like(order_R, dtype=torch.bool)
        return assignment.keep(served_R.index_put((order_R,), rank_R < capacity))


class BiasBalancer(nn.Module):
    """Adds a bias to the scores by which experts are chosen, and to nothing else.

    After every step the bias of each expert below the mean load rises by `rate`, and
    that of each above it falls by `rate` (Wang et al. 2024, arXiv 2408.15664, Algorithm
    1; DeepSeek-V3). Route weights and router gradients are those of the unbiased
    scores. Scores are probabilities, as `rate` is meant for numbers between 0 and 1.

    A forward pass in training only counts, since a bias that changed there would break
    activation recomputation; `step` moves the bias. The detectors of damex call
    `all_reduce` after each forward pass and `step` before the next one, so a checkpoint
    contains the load of all processes, and a resumed run continues exactly, on any
    number of them. With gradient accumulation, divide the rate by the number of
    micro-batches for the same movement per update.

    `broadcast_buffers` of DDP overwrites the unsummed counts of other processes: with
    it, call `all_reduce` or `step` after every forward pass.
    """

    expert_rows = ("bias_E", "counts_E")
    bias_E: Tensor
    counts_E: Tensor
    seen_E: Tensor

    def __init__(self, num_experts: int, *, rate: float = 0.001) -> None:
        super().__init__()
        check_sizes("BiasBalancer", num_experts=num_experts)
        check_number("BiasBalancer", "above 0", rate=rate)
        self.rate = rate
        self.register_buffer("bias_E", torch.zeros(num_experts))
        # Of all processes, until the next step.
        self.register_buffer("counts_E", torch.zeros(num_experts, dtype=torch.int64))
        # Of this process only, not yet summed.
        seen_E = torch.zeros(num_experts, dtype=torch.int64)
        self.register_buffer("seen_E", seen_E, persistent=False)
        self._is_reduced = False

    @torch.no_grad()
    def forward(self, logits_VE: Tensor) -> Tensor:
        """Return probabilities plus bias, without gradient, of (noisy) logits."""
        if logits_VE.shape[-1] != self.bias_E.shape[0]:
            raise ValueError(
                f"BiasBalancer: made for {self.bias_E.shape[0]} experts, but the "
                f"router scores {logits_VE.shape[-1]}; give both the same num_experts"
            )
        return torch.softmax(logits_VE, dim=-1) + self.bias_E

    def observe(self, counts_E: Tensor) -> None:
        """Add the load of one forward pass in training to that of the step."""
        if not self._is_reduced:
            self.seen_E.add_(counts_E)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context whose load does not count."""
        seen_E = self.seen_E.clone()
        yield
        self.seen_E.copy_(seen_E)

    def all_reduce(self) -> None:
        """Sum the load of the step over all processes, and close it; collective.

        Later counts, such as those of activation recomputation, are ignored until
        `step`. RuntimeError if the step is closed already.
        """
        if self._is_reduced:
            raise RuntimeError(
                "BiasBalancer: a second training step ended without step(), so the "
                "bias would never move; call begin_step of the gate (of a detector: "
                "begin_step of the detector) before each forward in training"
            )
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self.seen_E)
        self.counts_E.add_(self.seen_E)
        self.seen_E.zero_()
        self._is_reduced = True

    def step(self) -> None:
        """Move the bias by the load of all processes since the last step."""
        if not self._is_reduced:
            self.all_reduce()
        load_E = self.counts_E.double()
        # Wang et al. 2024, Algorithm 1: b_e <- b_e + rate * sign(mean - load_e).
        self.bias_E.add_(torch.sign(load_E.mean() - load_E).float(), alpha=self.rate)
        self.counts_E.zero_()
        self._is_reduced = False


NOISES = ("gaussian", "uniform")


class TopKGate(Gate):
    """Sends each token to the K experts with the largest logits.

    The weight of a route is the softmax over all E experts, taken at the chosen expert
    (DAMEX, Switch, V-MoE), so the router learns from the task loss. With `renormalize`
    the K weights of a token sum to 1; for k=1 the router then learns from the routing
    losses alone. With `renormalize` and `weight_scale=k` each weight is 1 if the chosen
    logits tie, as experts cut from one FFN need it. Ties go to
    the lowest expert id, on every device.

    Args:
        renormalize: Whether to take the softmax over the K chosen experts instead.
        noise: Added to the logits in training before choosing: 'gaussian' for N(0, 1)
            (V-MoE, DAMEX), 'uniform' for U[0, 1) (Chen et al. 2022), or None.
        noise_scale: Factor on the noise, by default 1/E (gaussian) or 1 (uniform).
        noisy_weights: Whether weights come from the noisy logits, as in the released
            code of DAMEX, rather than from the clean ones.
        weight_scale: Factor on the weights, above 0.
        balance: Balances the load of the experts by a bias on the choice.
        capacity: Limits how many tokens an expert serves; by default nothing is
            dropped. Makes an image's result depend on its batch, see `ExpertCapacity`.
    """

    def __init__(
        self,
        k: int = 1,
        *,
        renormalize: bool = False,
        noise: Literal["gaussian", "uniform"] | None = None,
        noise_scale: float | None = None,
        noisy_weights: bool = False,
        weight_scale: float = 1.0,
        balance: BiasBalancer | None = None,
        capacity: ExpertCapacity | None = None,
    ) -> None:
        super().__init__()
        check_sizes("TopKGate", k=k)
        if noise is not None:
            check_choice("TopKGate", NOISES, noise=noise)
        elif noise_scale is not None or noisy_weights:
            raise ValueError(
                "TopKGate: noise_scale and noisy_weights have no effect without "
                f"noise; set noise to one of {NOISES} or leave them out"
            )
        check_number("TopKGate", ">= 0", noise_scale=noise_scale)
        check_number("TopKGate", "above 0", weight_scale=weight_scale)
        self.k = k
        self.renormalize = renormalize
        self.noise = noise
        self.noise_scale = noise_scale
        self.noisy_weights = noisy_weights
        self.weight_scale = weight_scale
        self.balance = balance
        self.capacity = capacity

    @property
    def has_fixed_routes(self) -> bool:
        """False only if a capacity may drop some of the k routes of a token."""
        return self.capacity is None or self.k == 1

    @property
    def has_constant_weights(self) -> bool:
        """True for the one weight of a token, renormalized."""
        return self.renormalize and self.k == 1

    def check_group_choice(self, choice: GroupChoice, *, smallest: int) -> None:
        """Reject k above the size of a group, and a bias with teacher forcing."""
        if self.k > smallest:
            raise ValueError(
                f"TopKGate: {' and '.join(choice.options)} keeps a token to the "
                f"experts of one group, but k={self.k} and a group has {smallest}; set "
                f"k={smallest}, or give each group {self.k} experts or more"
            )
        if choice.teacher_forcing and self.balance is not None:
            raise ValueError(
                "TopKGate: teacher_forcing cannot be combined with balance: the load "
                "of the groups is that of the datasets, so the bias would grow without "
                "limit and override the router in evaluation; leave one of them out"
            )

    def begin_step(self, progress: float | None) -> None:
        """Move the bias by the load of the previous step."""
        if self.balance is not None:
            self.balance.step()

    def end_step(self) -> None:
        """Sum the load of the step over all processes."""
        if self.balance is not None:
            self.balance.all_reduce()

    def uncounted(self) -> AbstractContextManager[None]:
        """Return a context whose tokens do not move the bias."""
        return super().uncounted() if self.balance is None else self.balance.uncounted()

    def forward(
        self,
        logits_VE: Tensor,
        packing: Packing | None = None,
        allowed_VE: Tensor | None = None,
    ) -> Assignment:
        """Choose K routes for each token, minus those beyond a capacity.

        Raises ValueError if there are fewer than k experts.
        """
        num_experts = logits_VE.shape[-1]
        if self.k > num_experts:
            raise ValueError(
                f"TopKGate: k={self.k} experts per token asked for, but there are only "
                f"{num_experts} experts; lower k or raise num_experts"
            )
        # Chen et al. 2022, section 3.3: argmax_m (h_m + r_m), with a new r per step.
        noisy_VE = self._add_noise(logits_VE)
        # A stable sort, as torch.topk may break ties differently on each device.
        rank_by_VE = noisy_VE if self.balance is None else self.balance(noisy_VE)
        if allowed_VE is not None:
            rank_by_VE = restrict(rank_by_VE, allowed_VE)
        sorted_ids_VE = torch.sort(rank_by_VE, dim=-1, descending=True, stable=True)[1]
        ids_VK = sorted_ids_VE[:, : self.k]
        scores_VE = noisy_VE if self.noisy_weights else logits_VE
        assignment = Assignment.from_topk(
            ids_VK, self._weights(scores_VE, ids_VK), num_experts=num_experts
        )
        if self.balance is not None and self.training:
            self.balance.observe(assignment.counts_E)
        if self.capacity is not None:
            probs_VE = torch.softmax(noisy_VE, dim=-1)
            assignment = self.capacity.apply(assignment, ids_VK, probs_VE)
        return assignment

    def extra_repr(self) -> str:
        """Return the options, for `print(module)`."""
        return (
            f"k={self.k}, renormalize={self.renormalize}, noise={self.noise!r}, "
            f"capacity={self.capacity}"
        )

    def _weights(self, scores_VE: Tensor, ids_VK: Tensor) -> Tensor:
        if self.renormalize:
            # Equal to dividing the K probabilities by their sum, but cannot be 0/0.
            weights_VK = torch.softmax(scores_VE.gather(1, ids_VK), dim=-1)
        else:
            # Chen et al. 2022, section 3.2: pi_m = exp h_m / sum_n exp h_n.
            weights_VK = torch.softmax(scores_VE, dim=-1).gather(1, ids_VK)
        return weights_VK * self.weight_scale

    def _add_noise(self, logits_VE: Tensor) -> Tensor:
        if self.noise is None or not self.training:
            return logits_VE
        # Released code of DAMEX: N(0, 1) / E.
        draw, default = torch.randn_like, 1.0 / logits_VE.shape[-1]
        if self.noise == "uniform":
            # Chen et al. 2022, Algorithm 1, line 4: Unif[0, 1].
            draw, default = torch.rand_like, 1.0
        scale = default if self.noise_scale is None else self.noise_scale
        return logits_VE + draw(logits_VE) * scale
