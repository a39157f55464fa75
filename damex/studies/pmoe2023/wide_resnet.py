"""A small wide residual network, and WRN-pMoE beside it (section 5.2, appendix L).

Axes: B images, C channels, H x W cells of a map, E experts, G classes.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from damex.moe import (
    ExpertChoiceGate,
    LinearRouter,
    MoELayer,
    PatchConvExperts,
    route_patches,
)
from damex.studies.pmoe2023.patch_data import GRID, PatchSamples

__all__ = ["WideResNet", "as_images", "last_layer_parameters"]

WIDTHS = (8, 8, 16, 32)  # of the first convolution and the three groups
NUM_EXPERTS = 8
NUM_TOKENS = 2


class WideResNet(nn.Module):
    """WRN-10 with three blocks; with experts its last convolution is a pMoE layer.

    As in the paper's released code, the last block of WRN-pMoE has no identity path,
    and batch norm and ReLU follow on the experts.

    Args:
        side: Of an image; the last map is a quarter of it, in GRID x GRID patches.
        num_classes: G.
        experts: Whether the last convolution is a pMoE layer.
    """

    def __init__(self, *, side: int, num_classes: int, experts: bool) -> None:
        super().__init__()
        stem, first, second, third = WIDTHS
        self.stem = _conv(1, stem)
        self.first = _Block(stem, first, stride=1)
        self.second = _Block(first, second, stride=2)
        self.third: nn.Module
        if experts:
            self.third = _PatchBlock(second, third, patch_size=side // 4 // GRID)
        else:
            self.third = _Block(second, third, stride=2)
        self.norm = nn.BatchNorm2d(third)
        self.head = nn.Linear(third, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Classifies images.

        Args:
            images_BCHW: One channel.

        Returns:
            logits_BG.
        """
        features = self.third(self.second(self.first(self.stem(images_BCHW))))
        return self.head(self.norm(features).relu().mean((2, 3)))


class _Block(nn.Module):
    """Two convolutions, each after batch norm and ReLU, and an identity path."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = _conv(in_channels, out_channels, stride=stride)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv(out_channels, out_channels)
        same = in_channels == out_channels and stride == 1
        self.shortcut = (
            None
            if same
            else nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
        )

    def forward(self, map_BCHW: Tensor) -> Tensor:
        entry = self.norm1(map_BCHW).relu()
        identity = map_BCHW if self.shortcut is None else self.shortcut(entry)
        return identity + self.conv2(self.norm2(self.conv1(entry)).relu())


class _PatchBlock(nn.Module):
    """A convolution, then one whose output channels are shared out among experts."""

    def __init__(self, in_channels: int, out_channels: int, *, patch_size: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = _conv(in_channels, out_channels, stride=2)
        self.norm2 = nn.BatchNorm2d(out_channels)
        experts = PatchConvExperts(
            NUM_EXPERTS, out_channels, out_channels, patch_size=patch_size
        )
        self.conv2 = MoELayer(
            router=LinearRouter(experts.embed_dims, NUM_EXPERTS, init_std=1e-4),
            gate=ExpertChoiceGate(num_tokens=NUM_TOKENS),
            experts=experts,
        )

    def forward(self, map_BCHW: Tensor) -> Tensor:
        entry = self.norm2(self.conv1(self.norm1(map_BCHW).relu())).relu()
        return route_patches(self.conv2, entry)[0]


def as_images(samples: PatchSamples) -> PatchSamples:
    """The same samples with their patches put together.

    Args:
        samples: Of square patches.

    Returns:
        Samples whose `patches_BND` are images (B, 1, H, W).
    """
    side = round(samples.patches_BND.shape[2] ** 0.5)
    rows = samples.patches_BND.unflatten(2, (side, side)).unflatten(1, (GRID, GRID))
    images_BHW = rows.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return PatchSamples(images_BHW.unsqueeze(1), samples.labels_B, samples.position_B)


def last_layer_parameters(model: WideResNet) -> tuple[int, int]:
    """Parameters of the last convolution, or of its experts, and of their router.

    Args:
        model: With or without experts.
    """
    third = model.third
    if isinstance(third, _PatchBlock):
        moe = third.conv2
        return _numel(cast(nn.Module, moe.experts)), _numel(cast(nn.Module, moe.router))
    return _numel(cast(_Block, third).conv2), 0


def _conv(in_channels: int, out_channels: int, *, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
    # as PatchConvExperts draws its kernels, so that both networks start alike
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
