"""Identities that hold for any weights.

Axes: B images, N tokens per image, T = B*N tokens, D features, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional

from damex.moe import ExpertCapacity, dropped_counts
from studies.damex2023.mixing import ROUTER_STD, damex_layer
from studies.report import Row, checked

DIMS, NUM_EXPERTS, NUM_TOKENS = 16, 8, 900
LARGEST_OF_EIGHT = 1.4236  # expected largest of eight standard normal values


def exact_rows(seeds: Sequence[int]) -> list[Row]:
    """What has to hold exactly."""
    capacity = ExpertCapacity(factor=1.25)
    rows = [
        checked(
            "loss minus cross-entropy, two images of two data sets",
            [loss_gap(seed=seed) for seed in seeds],
            "< 1e-6",
            lambda x: x < 1e-6,
            published="0",
            digits=8,
        ),
        checked(
            "output with minus without data set ids in a test",
            [metadata_gap(seed=seed) for seed in seeds],
            "0",
            lambda x: x <= 0.0,
            digits=1,
        ),
        *_first_weight_rows(seeds),
    ]
    for tokens, limit, expected in (
        (900, capacity, 141),
        (1100, capacity, 172),
        (900, None, 900),
    ):
        served, rest = drops_of_a_good_router(tokens, capacity=limit)
        rows.append(
            Row(
                f"served of {tokens} tokens that go to one of 8 experts",
                str(expected) if limit else "-",
                [float(served)],
                f"= {expected}, others exactly 0",
                served == expected and rest == 0.0,
                "capacity 1.25" if limit else "dropless",
                0,
            )
        )
    return rows


def _first_weight_rows(seeds: Sequence[int]) -> list[Row]:
    """Gate weights before training: what a router of eight normal logits gives."""
    found = [first_gate_weights(seed=seed) for seed in seeds]
    means = [weights.mean for weights in found]
    expected = fmean(weights.expected for weights in found)
    extremes = [edge for one in found for edge in (one.smallest, one.largest)]
    return [
        Row(
            "E times the mean gate weight at the start",
            "-",
            means,
            f"mean within 0.005 of {expected:.3f} (eight normal logits)",
            abs(fmean(means) - expected) <= 0.005,
            "router std 0.005",
        ),
        checked(
            "E times a gate weight at the start (smallest and largest by seed)",
            extremes,
            "in [0.9, 1.1]",
            lambda x: 0.9 <= x <= 1.1,
            "router std 0.005",
            digits=3,
        ),
    ]


@dataclass(frozen=True)
class FirstWeights:
    """Gate weights before training, times E.

    Attributes:
        mean: Over routes.
        smallest: Of all routes.
        largest: Of all routes.
        expected: What `mean` should be, by arithmetic.
    """

    mean: float
    smallest: float
    largest: float
    expected: float


def loss_gap(*, seed: int) -> float:
    """Difference of the layer's loss to cross-entropy, two images of two data sets.

    The expected value is the mean of the two images' own cross-entropies, computed
    with the tokens query by query.
    """
    layer, tokens_BND = damex_layer(DIMS, NUM_EXPERTS, seed=seed), _tokens(2, seed=seed)
    _, record = layer(tokens_BND, group_ids_B=torch.tensor([3, 1]))
    logits_NBE = layer.router(tokens_BND.transpose(0, 1))
    targets_NB = torch.tensor([3, 1]).expand(NUM_TOKENS, 2)
    expected = functional.cross_entropy(logits_NBE.flatten(0, 1), targets_NB.flatten())
    return abs(record.losses["dataset_routing"].item() - 0.1 * expected.item())


@torch.no_grad()
def metadata_gap(*, seed: int) -> float:
    """Largest difference between outputs with and without data set ids in a test."""
    layer, tokens_BND = (
        damex_layer(DIMS, NUM_EXPERTS, seed=seed).eval(),
        _tokens(2, seed=seed),
    )
    given, _ = layer(tokens_BND, group_ids_B=torch.tensor([5, 2]))
    hidden, _ = layer(tokens_BND)
    return (given - hidden).abs().max().item()


@torch.no_grad()
def first_gate_weights(*, seed: int) -> FirstWeights:
    """Weights of routes before any training, times E.

    A logit is normal with the standard deviation `ROUTER_STD` |x|, and the largest of
    eight lies 1.4236 deviations above their mean; to first order that is what the
    weight of a top-1 route times E is above 1.
    """
    layer = damex_layer(DIMS, NUM_EXPERTS, seed=seed).eval()
    tokens_BND = _tokens(2, seed=seed)
    weight_R = layer.route(tokens_BND).assignment.weight_R * NUM_EXPERTS
    deviation = ROUTER_STD * tokens_BND.norm(dim=2).mean().item()
    return FirstWeights(
        mean=weight_R.mean().item(),
        smallest=weight_R.min().item(),
        largest=weight_R.max().item(),
        expected=1.0 + LARGEST_OF_EIGHT * deviation,
    )


@torch.no_grad()
def drops_of_a_good_router(
    num_tokens: int, *, capacity: ExpertCapacity | None
) -> tuple[int, float]:
    """Route one image whose tokens all belong to one expert.

    Returns how many are served, and the largest output of the others (0 if none).
    """
    layer = damex_layer(DIMS, NUM_EXPERTS, seed=0, capacity=capacity).eval()
    # The first feature is 1 for all tokens, and only expert 5 looks at it.
    weight_ED = layer.get_parameter("router.weight_ED").zero_()
    weight_ED[5, 0] = 6.0
    tokens_1ND = _tokens(1, seed=0, num_tokens=num_tokens)
    tokens_1ND[..., 0] = 1.0
    out_1ND, record = layer(tokens_1ND)
    dropped, asked = dropped_counts(record)
    served_T = torch.zeros(num_tokens, dtype=torch.bool)
    served_T[record.assignment.token_index_R] = True
    rest = out_1ND.flatten(0, 1)[~served_T]
    return int(asked - dropped), rest.abs().max().item() if len(rest) else 0.0


def _tokens(num_images: int, *, seed: int, num_tokens: int = NUM_TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_images, num_tokens, DIMS, generator=generator)
