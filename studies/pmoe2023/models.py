"""The networks: pMoE and the CNN of section 3.1, WRN-pMoE and WRN of section 5.2.

Axes: B samples, N patches of a sample, D pixels of a patch, E experts, O filters of an
expert, R routes (patch-expert pairs), C scores of a sample or channels of a map of H x
W cells, G classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe import LinearRouter, MoELayer, RoutingRecord, grouped_linear
from damex.papers.expert_choice import ExpertChoiceGate
from damex.papers.patches import PatchConvExperts, route_patches
from studies.pmoe2023.data import GRID, PatchSamples


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and starting values of a network.

    Attributes:
        num_experts: k.
        num_filters: m, hidden nodes of all experts together.
        num_tokens: l, patches that each expert takes.
        joint: Whether the router learns with the experts (eq. 4); else it is trained
            before them and the gating values are 1 (eq. 3).
        router_std: Standard deviation of the router's first weights.
        filter_std: That of the filters; None for 1/sqrt(m), as in eq. 8.
        output: Fixed weights of the second layer: 'normal' for N(0, 1) as in the paper,
            'signs' for +1 in the first and -1 in the second of two experts.
        pool: 'taken' divides by l, as eq. 1 does, 'all' by n.
    """

    num_experts: int
    num_filters: int
    num_tokens: int
    joint: bool
    router_std: float = 1e-4
    filter_std: float | None = None
    output: Literal["normal", "signs"] = "normal"
    pool: Literal["taken", "all"] = "taken"


class FilterExperts(nn.Module):
    """Experts of eq. 1: filters that learn, ReLU, and a second layer that does not."""

    output_EOC: Tensor

    def __init__(self, recipe: Recipe, *, embed_dims: int, num_scores: int) -> None:
        super().__init__()
        self.num_experts = recipe.num_experts
        self._recipe = recipe
        width = recipe.num_filters // recipe.num_experts
        self.filter_EDO = nn.Parameter(torch.empty(self.num_experts, embed_dims, width))
        output_EOC = torch.zeros(self.num_experts, width, num_scores)
        self.register_buffer("output_EOC", output_EOC)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new filters and a new second layer."""
        nn.init.normal_(self.filter_EDO, std=_filter_std(self._recipe))
        if self._recipe.output == "normal":
            nn.init.normal_(self.output_EOC)
        else:
            self.output_EOC[0], self.output_EOC[1] = 1.0, -1.0

    def forward(self, patches_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Score each patch with its expert: sum over r of a_rs * ReLU(<w_rs, x>)."""
        hidden_RO = grouped_linear(patches_RD, self.filter_EDO, None, counts_E).relu()
        return grouped_linear(hidden_RO, self.output_EOC, None, counts_E)


class PatchMoE(nn.Module):
    """f_M of eq. 1; for more than two classes that of appendix M."""

    def __init__(
        self, recipe: Recipe, *, embed_dims: int, num_classes: int = 2
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.num_classes = num_classes
        self.moe = MoELayer(
            router=LinearRouter(
                embed_dims, recipe.num_experts, init_std=recipe.router_std
            ),
            gate=ExpertChoiceGate(
                num_tokens=recipe.num_tokens,
                weights="selected" if recipe.joint else "one",
            ),
            experts=FilterExperts(
                recipe, embed_dims=embed_dims, num_scores=_num_scores(num_classes)
            ),
        )

    @property
    def router_weight_ED(self) -> nn.Parameter:
        """The gating kernels w_s."""
        return cast(LinearRouter, self.moe.router).weight_ED

    def forward(self, patches_BND: Tensor) -> Tensor:
        """Classify samples: logits (B, G)."""
        return self.forward_with_record(patches_BND)[0]

    def forward_with_record(self, patches_BND: Tensor) -> tuple[Tensor, RoutingRecord]:
        """As `forward`, with what was routed."""
        scores_BNC, record = self.moe(patches_BND)
        taken = self.recipe.pool == "taken"
        count = self.recipe.num_tokens if taken else patches_BND.shape[1]
        return _logits(scores_BNC.sum(1) / count), record


class PatchCNN(nn.Module):
    """f_C of eq. 5: pMoE with one expert that takes all patches with gating value 1.

    Args:
        num_filters: m.
        embed_dims: D.
        num_classes: G.
        filter_std: Standard deviation of the first filters; None for 1/sqrt(m).
    """

    output_OC: Tensor

    def __init__(
        self,
        num_filters: int,
        *,
        embed_dims: int,
        num_classes: int = 2,
        filter_std: float | None = None,
    ) -> None:
        super().__init__()
        self.filters = nn.Linear(embed_dims, num_filters, bias=False)
        std = num_filters**-0.5 if filter_std is None else filter_std
        nn.init.normal_(self.filters.weight, std=std)
        output_OC = torch.randn(num_filters, _num_scores(num_classes))
        self.register_buffer("output_OC", output_OC)

    def forward(self, patches_BND: Tensor) -> Tensor:
        """Classify samples; see `PatchMoE.forward`."""
        hidden_BNO = self.filters(patches_BND).relu()
        return _logits(hidden_BNO.mean(1) @ self.output_OC)


def _num_scores(num_classes: int) -> int:
    return 1 if num_classes == 2 else num_classes


def _logits(scores_BC: Tensor) -> Tensor:
    """Two classes have one score f; the cross-entropy of (f, 0) is log(1 + e^-yf)."""
    return functional.pad(scores_BC, (0, 1)) if scores_BC.shape[1] == 1 else scores_BC


def _filter_std(recipe: Recipe) -> float:
    if recipe.filter_std is None:
        return 1 / math.sqrt(recipe.num_filters)
    return recipe.filter_std


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
        """Classify images: logits (B, G)."""
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
    """The same samples with their patches put together: images (B, 1, H, W)."""
    side = round(samples.patches_BND.shape[2] ** 0.5)
    rows = samples.patches_BND.unflatten(2, (side, side)).unflatten(1, (GRID, GRID))
    images_BHW = rows.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return PatchSamples(images_BHW.unsqueeze(1), samples.labels_B, samples.position_B)


def last_layer_parameters(model: WideResNet) -> tuple[int, int]:
    """Parameters of the last convolution, or of its experts, and of their router."""
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
