"""All that the study measures, network by network and seed by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from damex.studies.deepmoe2019.digits import Digits, draw_digits
from damex.studies.deepmoe2019.measures import (
    Scores,
    conv_flops,
    counted_flops,
    embedding_flops,
    flops_by_hand,
    open_gate_gap,
    score,
)
from damex.studies.deepmoe2019.network import DigitNet, Stages, build_network
from damex.studies.deepmoe2019.training import (
    Recipe,
    train_joint,
    train_with_fixed_gates,
)
from damex.studies.deepmoe2019.widening import STRATEGIES, VGG, shrink
from damex.studies.progress import StudyProgress

__all__ = [
    "EMBEDDING_WIDTHS",
    "WEAK_EMBEDDING_WIDTHS",
    "WIDE",
    "Case",
    "Design",
    "Measured",
    "Plan",
    "measure",
    "measure_all",
]

WIDE: Stages = ((32, 32), (32,))
HALF: Stages = ((16, 16), (16,))
# Somewhat more operations than WIDE has left at a lambda of 1e-3.
THIN: Stages = ((5, 5), (5,))
EMBEDDING_WIDTHS = (8, 16, 32)
WEAK_EMBEDDING_WIDTHS = (4, 8)
Case = tuple[str, ...]  # a table's name and a line's


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is run.

    Attributes:
        seeds: Of parting, weights and order.
        l1_weights: Values of lambda, rising; 1e-3 must be one of them.
        strategies: Names of widening strategies.
        vgg_divisor: By how much VGG-16's widths are divided.
        recipe: Of the networks with three convolutions.
        other_recipes: Further ones for the plain and the gated network, by name.
        vgg_recipe: Of those with thirteen.
        num_train: Training images.
        num_flop_images: Test images with which operations are counted.
    """

    seeds: Sequence[int]
    l1_weights: Sequence[float]
    strategies: Sequence[str]
    vgg_divisor: int
    recipe: Recipe
    other_recipes: Mapping[str, Recipe]
    vgg_recipe: Recipe
    num_train: int = 1200
    num_flop_images: int = 100


@dataclass(frozen=True)
class Design:
    """A network and how it is trained.

    Attributes:
        stages: Widths.
        recipe: Training.
        embedding_widths: Of the gating path; None for a plain network.
    """

    stages: Stages
    recipe: Recipe
    embedding_widths: Sequence[int] | None = EMBEDDING_WIDTHS


@dataclass(frozen=True)
class Measured:
    """One network.

    Attributes:
        joint: After stage 1.
        final: After stage 2.
        flops: Executed for one image, see `counted_flops`.
        flops_by_hand: What should be.
        dense_flops: Of the convolutions with all channels open.
        embedding_flops: Of the gating path.
        skip_gap: Largest difference of a logit that skipping makes.
        open_gate_gap: Largest difference of a logit that gates of 1 make.
        gating_moved: Largest change of anything in the gating path during stage 2.
    """

    joint: Scores
    final: Scores
    flops: float
    flops_by_hand: float
    dense_flops: float
    embedding_flops: float
    skip_gap: float
    open_gate_gap: float
    gating_moved: float


def measure_all(plan: Plan, progress: StudyProgress) -> dict[Case, list[Measured]]:
    """Trains and tests every network for every seed.

    Args:
        plan: How much.
        progress: Told after each network.
    """
    cases = _cases(plan)
    runs = [(case, seed) for seed in plan.seeds for case in cases]
    found: dict[Case, list[Measured]] = {case: [] for case in cases}
    for case, seed in progress.track(runs, "networks"):
        digits = draw_digits(seed=seed, num_train=plan.num_train)
        found[case].append(
            measure(
                cases[case], digits, seed=seed, num_flop_images=plan.num_flop_images
            )
        )
    return found


def measure(
    design: Design, digits: Digits, *, seed: int, num_flop_images: int
) -> Measured:
    """Builds, trains in both stages and measures one network.

    Args:
        design: The network and its training.
        digits: The data.
        seed: Of weights and order.
        num_flop_images: Test images with which operations are counted.
    """
    recipe = design.recipe
    network = build_network(
        design.stages, embedding_widths=design.embedding_widths, seed=seed
    )
    generator = torch.Generator().manual_seed(seed)
    train_joint(network, digits, recipe, generator)
    joint, before = score(network, digits), _gating_state(network)
    train_with_fixed_gates(network, digits, recipe, generator)
    after = _gating_state(network)
    moved = [(before[key] - after[key]).abs().max().item() for key in before]
    images_B1HW = digits.test_images_B1HW[:num_flop_images]
    flops, gap = counted_flops(network, images_B1HW)
    return Measured(
        joint=joint,
        final=score(network, digits),
        flops=flops,
        flops_by_hand=flops_by_hand(network, images_B1HW),
        dense_flops=conv_flops(network, {}, num_images=1),
        embedding_flops=embedding_flops(network),
        skip_gap=gap,
        open_gate_gap=open_gate_gap(network, images_B1HW),
        gating_moved=max(moved, default=0.0),
    )


def _cases(plan: Plan) -> dict[Case, Design]:
    cases: dict[Case, Design] = {
        ("plain", "32"): Design(WIDE, plan.recipe, None),
        ("plain", "16"): Design(HALF, plan.recipe, None),
        ("plain", "5"): Design(THIN, plan.recipe, None),
        ("mu 0",): Design(WIDE, replace(plan.recipe, aux_weight=0.0)),
        ("weak embedding",): Design(WIDE, plan.recipe, WEAK_EMBEDDING_WIDTHS),
    }
    for name, recipe in plan.other_recipes.items():
        cases["plain", name] = Design(WIDE, recipe, None)
        cases["other", name] = Design(WIDE, recipe)
    for weight in plan.l1_weights:
        recipe = replace(plan.recipe, l1_weight=weight)
        cases["sweep", f"{weight:g}"] = Design(WIDE, recipe)
    widened: Mapping[str, Stages] = {
        "not widened": VGG,
        **{name: STRATEGIES[name] for name in plan.strategies},
    }
    vgg = shrink(VGG, plan.vgg_divisor)
    cases["VGG", "plain"] = Design(vgg, plan.vgg_recipe, None)
    for name, stages in widened.items():
        shrunk = shrink(stages, plan.vgg_divisor)
        cases["VGG", name] = Design(shrunk, plan.vgg_recipe)
    return cases


def _gating_state(network: DigitNet) -> dict[str, Tensor]:
    """Parameters and statistics of the gating path, copied."""
    if network.gating is None:
        return {}
    state = network.gating.state_dict()
    return {key: value.double().clone() for key, value in state.items()}
