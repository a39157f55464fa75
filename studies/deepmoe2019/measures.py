"""Which networks are trained, and what is measured of each.

Axes: B images, H and W height and width, C channels, E entries of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from damex.papers.channels import ChannelGate, active_share
from studies.deepmoe2019.network import (
    STRATEGIES,
    VGG,
    DigitNet,
    Recipe,
    Stages,
    draw_digits,
    shrink,
    train,
)
from studies.digits import DIGIT_SIDE, DigitSource
from studies.harness import Session, seeded

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


def measure_all(plan: Plan, session: Session) -> dict[Case, list[Measured]]:
    """Train and test every network for every seed."""
    designs = _designs(plan)

    def measure(case: Case, seed: int) -> Measured:
        digits = draw_digits(seed=seed, num_train=plan.num_train)
        return _measure(designs[case], digits, seed, plan.num_flop_images)

    jobs = [(case, seed) for seed in plan.seeds for case in designs]
    return session.run(jobs, measure, "networks")


def _measure(
    design: Design, digits: DigitSource, seed: int, num_flop_images: int
) -> Measured:
    """Builds, trains in both stages and measures one network."""
    recipe = design.recipe
    with seeded(seed):
        network = DigitNet(design.stages, embedding_widths=design.embedding_widths)
    generator = torch.Generator().manual_seed(seed)
    train(network, digits, recipe, generator, stage=1)
    joint, before = score(network, digits), _gating_state(network)
    train(network, digits, recipe, generator, stage=2)
    after = _gating_state(network)
    moved = [(before[key] - after[key]).abs().max().item() for key in before]
    images_B1HW = digits.test.images_S1HW[:num_flop_images]
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


def _designs(plan: Plan) -> dict[Case, Design]:
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


@dataclass(frozen=True)
class Scores:
    """One network on the test images.

    Attributes:
        accuracy: In percent.
        active: Open channels, in percent.
        patterns: Number of different sets of open channels.
        embedding_accuracy: Of the embedding network alone, in percent.
        embedding_train_accuracy: The same on the training images.
        copied: Answers that are the embedding's, in percent.
        borrowed_accuracy: With the gates of another test image, in percent.
        blank_accuracy: Of a blank image with the gates of the real one, in percent.
    """

    accuracy: float
    active: float = 100.0
    patterns: int = 1
    embedding_accuracy: float = 0.0
    embedding_train_accuracy: float = 0.0
    copied: float = 0.0
    borrowed_accuracy: float = 0.0
    blank_accuracy: float = 0.0


@torch.no_grad()
def score(network: DigitNet, digits: DigitSource) -> Scores:
    """Test a network, all channels computed and closed ones multiplied by zero."""
    images_B1HW, labels_B = digits.test.images_S1HW, digits.test.labels_S
    _skip(network, skip=False)
    logits_BE, gates = network(images_B1HW)
    accuracy = _percent(logits_BE, labels_B)
    if gates is None or network.gating is None:
        return Scores(accuracy)
    train_gates = network.gating(digits.train.images_S1HW)
    borrowed = {name: g_BC.roll(1, dims=0) for name, g_BC in gates.layers.items()}
    layers = list(gates.layers.values())
    return Scores(
        accuracy=accuracy,
        active=100.0 * active_share(layers).item(),
        patterns=distinct_patterns(layers),
        embedding_accuracy=_percent(gates.logits_BE, labels_B),
        embedding_train_accuracy=_percent(train_gates.logits_BE, digits.train.labels_S),
        copied=_percent(logits_BE, gates.logits_BE.argmax(dim=1)),
        borrowed_accuracy=_percent(network.classify(images_B1HW, borrowed), labels_B),
        blank_accuracy=_percent(
            network.classify(torch.zeros_like(images_B1HW), gates.layers), labels_B
        ),
    )


def distinct_patterns(gates: Sequence[Tensor]) -> int:
    """Number of different sets of open channels among the images.

    One pattern for all images would be a pruned network and no mixture: expressive
    power grows with the number of patterns (Wang et al. 2019, appendix A.1).
    """
    open_BC = torch.cat([gates_BC > 0 for gates_BC in gates], dim=1)
    return int(torch.unique(open_BC, dim=0).shape[0])


@torch.no_grad()
def counted_flops(network: DigitNet, images_B1HW: Tensor) -> tuple[float, float]:
    """Count the operations of one image on average, with closed channels skipped.

    Of convolutions and linear layers, the gating path included; a multiply-add is two.
    Also returns the largest difference of a logit to the network without skipping.
    """
    _skip(network, skip=False)
    masked_BE, _ = network(images_B1HW)
    _skip(network, skip=True)
    with FlopCounterMode(display=False) as counter:
        skipped_BE, _ = network(images_B1HW)
    gap = (masked_BE - skipped_BE).abs().max().item()
    return counter.get_total_flops() / len(images_B1HW), gap


@torch.no_grad()
def open_gate_gap(network: DigitNet, images_B1HW: Tensor) -> float:
    """Largest difference of a logit between gates of 1 and no gates."""
    ones = {
        name: torch.ones(len(images_B1HW), layer.conv.out_channels)
        for name, layer in network.named_layers()
    }
    _skip(network, skip=False)
    gap = network.classify(images_B1HW, ones) - network.classify(images_B1HW, {})
    return gap.abs().max().item()


@torch.no_grad()
def flops_by_hand(network: DigitNet, images_B1HW: Tensor) -> float:
    """What `counted_flops` should count, by arithmetic."""
    gates: Mapping[str, Tensor] = {}
    if network.gating is not None:
        gates = network.gating(images_B1HW).layers
    return (
        conv_flops(network, gates, num_images=len(images_B1HW))
        + embedding_flops(network)
        + 2 * network.fc.weight.numel()
    )


def conv_flops(
    network: DigitNet, gates: Mapping[str, Tensor], *, num_images: int
) -> float:
    """Count the convolutions by hand: 2 * 9 * H * W * open inputs * open outputs.

    Of one image on average; all channels of a layer without gates are open.
    """
    total, size = 0.0, DIGIT_SIDE
    inputs_B = torch.ones(num_images, dtype=torch.float64)
    for name, layer in network.named_layers():
        outputs_B = torch.full_like(inputs_B, layer.conv.out_channels)
        if name in gates:
            outputs_B = (gates[name] > 0).sum(dim=1).double()
        total += (2 * 9 * size * size * inputs_B * outputs_B).mean().item()
        inputs_B = outputs_B
        if name in network.pooled and size > 1:
            size //= 2
    return total


def embedding_flops(network: DigitNet) -> float:
    """Count the gating path by hand, of one image; its convolutions have stride 2."""
    if network.gating is None:
        return 0.0
    total, size = 0.0, DIGIT_SIDE
    for module in network.gating.modules():
        if isinstance(module, nn.Conv2d):
            size = (size + 1) // 2
            total += 2 * 9 * size * size * module.in_channels * module.out_channels
        elif isinstance(module, nn.Linear):
            total += 2 * module.weight.numel()
        elif isinstance(module, ChannelGate):
            total += 2 * module.weight_CE.numel()
    return total


def _percent(logits_BE: Tensor, labels_B: Tensor) -> float:
    return 100.0 * (logits_BE.argmax(dim=1) == labels_B).double().mean().item()


def _skip(network: DigitNet, *, skip: bool) -> None:
    for _, layer in network.named_layers():
        layer.skip_closed = skip
