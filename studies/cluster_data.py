"""Data and router of Chen et al. 2022 (arXiv 2208.02813).

The data are those of Definition 3.1, of one distribution or of a mixture of them.

Axes: B samples, P = 4 patches, D features of a patch, K clusters, S = 2K directions,
E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from damex.moe import LinearRouter

NUM_PATCHES = 4


@dataclass(frozen=True)
class Strengths:
    """Laws of the patches: ranges of uniform factors, and the noise.

    Attributes:
        alpha: Of the label's signal.
        beta: Of the cluster's centre.
        gamma: Of the disturbing signal.
        noise_std: sigma_p; a noise patch is N(0, sigma_p^2 / D I).
    """

    alpha: tuple[float, float]
    beta: tuple[float, float]
    gamma: tuple[float, float]
    noise_std: float


# Greek letters restored from the authors' code. In 3, 4 and "verify" alpha and gamma
# have one law, as Theorem 4.1 asks for.
SETTINGS: Mapping[str, Strengths] = MappingProxyType(
    {
        "1": Strengths((0.5, 2.0), (1.0, 2.0), (0.5, 3.0), 1.0),
        "2": Strengths((0.5, 2.0), (1.0, 2.0), (0.5, 3.0), 2.0),
        "3": Strengths((0.5, 2.0), (1.0, 2.0), (0.5, 2.0), 1.0),
        "4": Strengths((0.5, 2.0), (1.0, 2.0), (0.5, 2.0), 2.0),
        "verify": Strengths((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), 1.0),
    }
)


@dataclass(frozen=True, eq=False)
class ClusterSamples:
    """What was drawn.

    Attributes:
        patches_BPD: Four patches each, in random order: y * alpha * signal, beta *
            centre, +-gamma * another cluster's signal, and noise.
        labels_B: y, float: -1 or 1.
        clusters_B: int64, the cluster of each sample.
    """

    patches_BPD: Tensor
    labels_B: Tensor
    clusters_B: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterTask:
    """A distribution; see `draw_task`.

    Attributes:
        signals_KD: v_k, whose sign is the label.
        centers_KD: c_k, which tells the cluster.
        strengths: Laws of the patches.
        num_groups: The first K / num_groups clusters are the first group, and so on.
            The signal that disturbs a sample comes from another cluster of its own
            group.
    """

    signals_KD: Tensor
    centers_KD: Tensor
    strengths: Strengths
    num_groups: int = 1

    @property
    def num_clusters(self) -> int:
        """K."""
        return self.signals_KD.shape[0]

    def draw(self, num_samples: int, generator: torch.Generator) -> ClusterSamples:
        """Draw samples; clusters and labels are equally likely."""
        size = self.num_clusters // self.num_groups
        clusters_B = torch.randint(
            self.num_clusters, (num_samples,), generator=generator
        )
        step_B = torch.randint(1, size, (num_samples,), generator=generator)
        first_B = clusters_B // size * size
        others_B = first_B + (clusters_B + step_B) % size
        labels_B = _signs(num_samples, generator)
        law = self.strengths
        factors = (
            _uniform(law.alpha, num_samples, generator) * labels_B,
            _uniform(law.beta, num_samples, generator),
            _uniform(law.gamma, num_samples, generator)
            * _signs(num_samples, generator),
        )
        directions = (
            self.signals_KD[clusters_B],
            self.centers_KD[clusters_B],
            self.signals_KD[others_B],
        )
        patches = [f.unsqueeze(1) * d for f, d in zip(factors, directions, strict=True)]
        dims = self.signals_KD.shape[1]
        noise_BD = torch.randn(num_samples, dims, generator=generator)
        noise_BD *= law.noise_std / dims**0.5
        patches_BPD = torch.stack([*patches, noise_BD], dim=1)
        order_BP = torch.rand(num_samples, NUM_PATCHES, generator=generator).argsort(1)
        patches_BPD = patches_BPD[torch.arange(num_samples).unsqueeze(1), order_BP]
        return ClusterSamples(patches_BPD, labels_B, clusters_B)


def draw_task(
    strengths: Strengths,
    generator: torch.Generator,
    *,
    num_clusters: int,
    dims: int,
    num_groups: int = 1,
) -> ClusterTask:
    """Draw signals and centres, all orthonormal.

    Raises ValueError if D is below 2K, or not every group has the same number of
    clusters, two or more.
    """
    if dims < 2 * num_clusters:
        raise ValueError(
            f"draw_task: {num_clusters} clusters need {2 * num_clusters} orthogonal "
            f"directions, but dims is {dims}"
        )
    if num_clusters % num_groups or num_clusters < 2 * num_groups:
        raise ValueError(
            f"draw_task: {num_clusters} clusters do not make {num_groups} groups of "
            "equal size with two or more clusters each"
        )
    normal_DS = torch.randn(dims, 2 * num_clusters, generator=generator)
    basis_DS = torch.linalg.qr(normal_DS).Q
    signals_KD, centers_KD = basis_DS.t().contiguous().chunk(2)
    return ClusterTask(
        signals_KD=signals_KD,
        centers_KD=centers_KD,
        strengths=strengths,
        num_groups=num_groups,
    )


def _signs(num_samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (num_samples,), generator=generator) * 2.0 - 1.0


def _uniform(
    bounds: tuple[float, float], num_samples: int, generator: torch.Generator
) -> Tensor:
    low, high = bounds
    return low + (high - low) * torch.rand(num_samples, generator=generator)


class PatchSumRouter(LinearRouter):
    """h_m(x) = <theta_m, sum_p x_p> (section 3.2); `embed_dims` is D."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every expert for every sample, (..., P * D) -> (..., E)."""
        return super().forward(tokens.unflatten(-1, (-1, self.embed_dims)).sum(-2))
