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

__all__ = ["HALF", "WIDE", "Case", "Measured", "Plan", "measure", "measure_all"]

WIDE: Stages = ((32, 32), (32,))
HALF: Stages = ((16, 16), (16,))
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
        vgg_recipe: Of those with thirteen.
        num_train: Training images.
        num_flop_images: Test images with which operations are counted.
    """

    seeds: Sequence[int]
    l1_weights: Sequence[float]
    strategies: Sequence[str]
    vgg_divisor: int
    recipe: Recipe
    vgg_recipe: Recipe
    num_train: int = 1200
    num_flop_images: int = 100


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
        stages, recipe, gated = cases[case]
        digits = draw_digits(seed=seed, num_train=plan.num_train)
        found[case].append(
            measure(
                stages,
                digits,
                recipe,
                gated=gated,
                seed=seed,
                num_flop_images=plan.num_flop_images,
            )
        )
    return found


def measure(
    stages: Stages,
    digits: Digits,
    recipe: Recipe,
    *,
    gated: bool,
    seed: int,
    num_flop_images: int,
) -> Measured:
    """Builds, trains in both stages and measures one network.

    Args:
        stages: Widths of the network.
        digits: The data.
        recipe: How it is trained.
        gated: Whether there is a gating path.
        seed: Of weights and order.
        num_flop_images: Test images with which operations are counted.
    """
    network = build_network(stages, gated=gated, seed=seed)
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


def _cases(plan: Plan) -> dict[Case, tuple[Stages, Recipe, bool]]:
    cases: dict[Case, tuple[Stages, Recipe, bool]] = {
        ("plain", "32"): (WIDE, plan.recipe, False),
        ("plain", "16"): (HALF, plan.recipe, False),
        ("mu 0", ""): (WIDE, replace(plan.recipe, aux_weight=0.0), True),
    }
    for weight in plan.l1_weights:
        recipe = replace(plan.recipe, l1_weight=weight)
        cases["sweep", f"{weight:g}"] = (WIDE, recipe, True)
    widened: Mapping[str, Stages] = {
        "not widened": VGG,
        **{name: STRATEGIES[name] for name in plan.strategies},
    }
    cases["VGG", "plain"] = (shrink(VGG, plan.vgg_divisor), plan.vgg_recipe, False)
    for name, stages in widened.items():
        shrunk = shrink(stages, plan.vgg_divisor)
        cases["VGG", name] = (shrunk, plan.vgg_recipe, True)
    return cases


def _gating_state(network: DigitNet) -> dict[str, Tensor]:
    """Parameters and statistics of the gating path, copied."""
    if network.gating is None:
        return {}
    state = network.gating.state_dict()
    return {key: value.double().clone() for key, value in state.items()}
