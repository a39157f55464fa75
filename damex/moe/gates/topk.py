"""Top-k: every token chooses its experts.

Axes: V real tokens, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from damex.errors import check_choice, check_number, check_sizes
from damex.moe.gates import Gate
from damex.moe.gates.balancing import BiasBalancer, ExpertCapacity
from damex.moe.routing import Assignment, GroupChoice, Packing, restrict

NOISES = ("gaussian", "uniform")


class TopKGate(Gate):
    """Sends each token to the K experts with the largest logits.

    The weight of a route is the softmax over all E experts, taken at the chosen expert
    (DAMEX, Switch, V-MoE), so the router learns from the task loss. With `renormalize`
    the K weights of a token sum to 1; for k=1 the router then learns from the routing
    losses alone. With `renormalize` and `weight_scale=k` each weight is 1 if the chosen
    logits tie, as experts cut from one FFN need it (see `damex.moe.split`). Ties go to
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
            weights_VK = torch.softmax(scores_VE, dim=-1).gather(1, ids_VK)
        return weights_VK * self.weight_scale

    def _add_noise(self, logits_VE: Tensor) -> Tensor:
        if self.noise is None or not self.training:
            return logits_VE
        draw, default = torch.randn_like, 1.0 / logits_VE.shape[-1]
        if self.noise == "uniform":
            draw, default = torch.rand_like, 1.0
        scale = default if self.noise_scale is None else self.noise_scale
        return logits_VE + draw(logits_VE) * scale
