"""What is measured of a trained network.

Axes: B images, H and W height and width, C channels, E entries of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from damex.moe import ChannelGate, active_share, distinct_patterns
from damex.studies.deepmoe2019.digits import Digits
from damex.studies.deepmoe2019.network import DigitNet
from damex.studies.digits import DIGIT_SIDE

__all__ = [
    "Scores",
    "conv_flops",
    "counted_flops",
    "embedding_flops",
    "flops_by_hand",
    "open_gate_gap",
    "score",
]


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
def score(network: DigitNet, digits: Digits) -> Scores:
    """Tests a network, all channels computed and closed ones multiplied by zero.

    Args:
        network: In evaluation.
        digits: The data.
    """
    images_B1HW, labels_B = digits.test_images_B1HW, digits.test_labels_B
    _skip(network, skip=False)
    logits_BE, gates = network(images_B1HW)
    accuracy = _percent(logits_BE, labels_B)
    if gates is None or network.gating is None:
        return Scores(accuracy)
    train_gates = network.gating(digits.train_images_B1HW)
    borrowed = {name: g_BC.roll(1, dims=0) for name, g_BC in gates.layers.items()}
    layers = list(gates.layers.values())
    return Scores(
        accuracy=accuracy,
        active=100.0 * active_share(layers).item(),
        patterns=distinct_patterns(layers),
        embedding_accuracy=_percent(gates.logits_BE, labels_B),
        embedding_train_accuracy=_percent(train_gates.logits_BE, digits.train_labels_B),
        copied=_percent(logits_BE, gates.logits_BE.argmax(dim=1)),
        borrowed_accuracy=_percent(network.classify(images_B1HW, borrowed), labels_B),
        blank_accuracy=_percent(
            network.classify(torch.zeros_like(images_B1HW), gates.layers), labels_B
        ),
    )


@torch.no_grad()
def counted_flops(network: DigitNet, images_B1HW: Tensor) -> tuple[float, float]:
    """Runs with closed channels skipped and counts what is executed.

    Args:
        network: In evaluation.
        images_B1HW: To count with.

    Returns:
        flops: Floating-point operations of one image on average, a multiply-add being
            two, of the convolutions and linear layers, the gating path included.
        gap: Largest difference of a logit to the same network without skipping.
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
    """Largest difference of a logit between gates of 1 and no gates.

    Args:
        network: In evaluation.
        images_B1HW: To compare with.
    """
    ones = {
        name: torch.ones(len(images_B1HW), layer.conv.out_channels)
        for name, layer in network.named_layers()
    }
    _skip(network, skip=False)
    gap = network.classify(images_B1HW, ones) - network.classify(images_B1HW, {})
    return gap.abs().max().item()


@torch.no_grad()
def flops_by_hand(network: DigitNet, images_B1HW: Tensor) -> float:
    """What `counted_flops` should count, by arithmetic.

    Args:
        network: In evaluation.
        images_B1HW: To count with.
    """
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
    """Counts the convolutions by hand: 2 * 9 * H * W * open inputs * open outputs.

    Args:
        network: Says widths and poolings.
        gates: Gates (B, C) by layer; none for the plain network.
        num_images: B.

    Returns:
        flops: Of one image on average.
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
    """Counts the gating path by hand: convolutions of stride 2, and linear layers.

    Args:
        network: With or without a gating path.

    Returns:
        flops: Of one image; 0 without a gating path.
    """
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
