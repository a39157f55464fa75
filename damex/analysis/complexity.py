"""Parameters and FLOPs of a detector: total, and active for one image or token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mmdet.structures import DetDataSample
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from damex.moe import Assignment, MoELayer

__all__ = ["PartComplexity", "count_complexity"]


@dataclass(frozen=True)
class PartComplexity:
    """What one part of a detector holds and computes.

    Attributes:
        name: Attribute of the detector, for instance ``decoder``.
        parameters: All parameters.
        active_parameters: Those that an average token meets: of a bank of E experts
            the share k/E if a token goes to k of them.
        flops: Floating-point operations for one image, a multiply-add counted as two.
    """

    name: str
    parameters: int
    active_parameters: int
    flops: int


@torch.no_grad()
def count_complexity(
    detector: nn.Module, *, height: int, width: int, seed: int = 0
) -> list[PartComplexity]:
    """Run one image of noise through the detector and count.

    Counted are matrix products, convolutions and attention, as they are executed: an
    expert that gets no token and a channel that is closed cost nothing. Not counted
    are element-wise operations and the sampling of deformable attention, which are
    the same with and without experts.

    Args:
        detector: A built detector; left in the mode (training or not) it was in.
        height: Height of the image in pixels.
        width: Width of the image.
        seed: Seed of the noise.

    Returns:
        One entry for each child module that holds parameters, in their order, and
        ``other`` for parameters of the detector itself.
    """
    was_training = detector.training
    detector.eval()
    shares: dict[int, float] = {}
    handles = [
        module.gate.register_forward_hook(_note_share(shares, module))
        for module in detector.modules()
        if isinstance(module, MoELayer) and isinstance(module.gate, nn.Module)
    ]
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            detector(*_noise(detector, height, width, seed), mode="predict")
    finally:
        for handle in handles:
            handle.remove()
        detector.train(was_training)
    flops = _flops_by_module(counter)
    parts = [
        PartComplexity(
            name=name,
            parameters=_count(part),
            active_parameters=_count(part) - _idle(part, shares),
            flops=flops.get(name, 0),
        )
        for name, part in detector.named_children()
        if _count(part)
    ]
    own = sum(p.numel() for p in detector.parameters(recurse=False))
    return [*parts, PartComplexity("other", own, own, 0)]


def _noise(
    detector: nn.Module, height: int, width: int, seed: int
) -> tuple[Tensor, list[DetDataSample]]:
    """An image as the data preprocessor hands it on, and its data sample."""
    device = next(detector.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(1, 3, height, width, generator=generator).to(device)
    shape = (height, width)
    meta = dict(img_shape=shape, ori_shape=shape, batch_input_shape=shape)
    return image, [DetDataSample(metainfo={**meta, "scale_factor": (1.0, 1.0)})]


def _note_share(shares: dict[int, float], layer: MoELayer) -> Any:
    """A hook for a gate: keeps the share of the experts that a token of it meets."""

    def hook(gate: nn.Module, inputs: tuple[Any, ...], assignment: Assignment) -> None:
        logits_BNE, *rest = inputs
        mask_BN = rest[0] if rest else None
        tokens = logits_BNE[..., 0].numel() if mask_BN is None else int(mask_BN.sum())
        routes = int(assignment.counts_E.sum())
        share = routes / max(tokens, 1) / layer.num_experts
        shares[id(layer)] = min(share, 1.0)

    return hook


def _idle(part: nn.Module, shares: Mapping[int, float]) -> int:
    """Parameters of experts that an average token of this part does not meet."""
    return sum(
        round(_count(layer.experts) * (1.0 - shares.get(id(layer), 1.0)))
        for layer in part.modules()
        if isinstance(layer, MoELayer) and isinstance(layer.experts, nn.Module)
    )


def _flops_by_module(counter: FlopCounterMode) -> dict[str, int]:
    """FLOPs of each child of the detector."""
    found = {}
    for path, operations in counter.get_flop_counts().items():
        names = path.split(".")
        if len(names) == 2:  # Detector.child
            found[names[1]] = sum(operations.values())
    return found


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
