"""Mixtures of classification: the data of Definition 3.1.

Axes: K clusters, N samples, P patches of a sample, D numbers in a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["SETTINGS", "Sample", "Setting", "Signals", "draw_sample", "draw_signals"]

NUM_CLUSTERS = 4
NUM_PATCHES = 4
PATCH_DIMS = 50


@dataclass(frozen=True)
class Setting:
    """Strength of the patches.

    Attributes:
        feature: Range of alpha, the strength of the label's patch.
        center: Range of beta, that of the cluster's patch.
        feature_noise: Range of gamma, that of the misleading patch.
        noise: sigma_p; a patch of noise is N(0, sigma_p^2 / D I).
    """

    feature: tuple[float, float]
    center: tuple[float, float]
    feature_noise: tuple[float, float]
    noise: float


# Greek letters restored from the authors' code. In 3, 4 and "verify" alpha and gamma
# have one law, as Theorem 4.1 asks for.
SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "1": Setting((0.5, 2.0), (1.0, 2.0), (0.5, 3.0), 1.0),
        "2": Setting((0.5, 2.0), (1.0, 2.0), (0.5, 3.0), 2.0),
        "3": Setting((0.5, 2.0), (1.0, 2.0), (0.5, 2.0), 1.0),
        "4": Setting((0.5, 2.0), (1.0, 2.0), (0.5, 2.0), 2.0),
        "verify": Setting((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), 1.0),
    }
)


@dataclass(frozen=True, eq=False)
class Signals:
    """What tells labels and clusters.

    Attributes:
        features_KD: v_k, the label's direction in cluster k.
        centers_KD: c_k, the direction of cluster k.
    """

    features_KD: Tensor
    centers_KD: Tensor


@dataclass(frozen=True, eq=False)
class Sample:
    """Labelled data.

    Attributes:
        patches_NPD: Patches in random order.
        labels_N: -1.0 or 1.0.
        clusters_N: int64, the cluster k.
    """

    patches_NPD: Tensor
    labels_N: Tensor
    clusters_N: Tensor


def draw_signals(generator: torch.Generator) -> Signals:
    """Draws 2K orthonormal directions.

    Args:
        generator: Source of randomness.
    """
    normal = torch.randn(PATCH_DIMS, 2 * NUM_CLUSTERS, generator=generator)
    basis_DS, _ = torch.linalg.qr(normal)
    first_KD, second_KD = basis_DS.t().contiguous().chunk(2)
    return Signals(features_KD=first_KD, centers_KD=second_KD)


def draw_sample(
    signals: Signals, setting: Setting, num: int, generator: torch.Generator
) -> Sample:
    """Draws from the distribution of Definition 3.1.

    Args:
        signals: Directions, the same for training and test.
        setting: Strengths.
        num: N.
        generator: Source of randomness.
    """
    clusters_N = torch.randint(NUM_CLUSTERS, (num,), generator=generator)
    shift_N = torch.randint(1, NUM_CLUSTERS, (num,), generator=generator)
    others_N = (clusters_N + shift_N) % NUM_CLUSTERS
    labels_N = _signs(num, generator)
    strengths = (
        _uniform(setting.feature, num, generator) * labels_N,
        _uniform(setting.center, num, generator),
        _uniform(setting.feature_noise, num, generator) * _signs(num, generator),
    )
    directions = (
        signals.features_KD[clusters_N],
        signals.centers_KD[clusters_N],
        signals.features_KD[others_N],
    )
    noise_ND = torch.randn(num, PATCH_DIMS, generator=generator)
    noise_ND *= setting.noise / PATCH_DIMS**0.5
    patches = [s.unsqueeze(1) * d for s, d in zip(strengths, directions, strict=True)]
    patches_NPD = torch.stack([*patches, noise_ND], dim=1)
    order_NP = torch.rand(num, NUM_PATCHES, generator=generator).argsort(dim=1)
    patches_NPD = patches_NPD[torch.arange(num).unsqueeze(1), order_NP]
    return Sample(patches_NPD=patches_NPD, labels_N=labels_N, clusters_N=clusters_N)


def _signs(num: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (num,), generator=generator) * 2.0 - 1.0


def _uniform(
    limits: tuple[float, float], num: int, generator: torch.Generator
) -> Tensor:
    low, high = limits
    return low + (high - low) * torch.rand(num, generator=generator)
