"""Data of Definition 3.1 of Chen et al. 2022 (arXiv 2208.02813), alone or as a mixture.

Axes: B samples, P = 4 patches, D features of a patch, K clusters, G groups of clusters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ClusterSamples", "ClusterTask", "draw_task"]


@dataclass(frozen=True, eq=False)
class ClusterSamples:
    """What was drawn.

    Attributes:
        patches_BPD: Four patches each, in random order: y * alpha * signal, beta *
            centre, +-gamma * another cluster's signal, and noise.
        labels_B: y, float: -1 or 1.
        clusters_B: int64, the cluster of each sample.
        groups_B: int64, the group of that cluster: the data set in a mixture.
    """

    patches_BPD: Tensor
    labels_B: Tensor
    clusters_B: Tensor
    groups_B: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterTask:
    """A distribution; see `draw_task`.

    Attributes:
        signals_KD: v_k, whose sign is the label.
        centers_KD: c_k, which tells the cluster.
        num_groups: G; the first K/G clusters are the first group, and so on. The signal
            that disturbs a sample comes from another cluster of its own group.
        alpha: Range of the strength of the label's signal, uniform.
        beta: Range of the strength of the centre.
        gamma: Range of the strength of the disturbing signal.
        noise_std: sigma_p; a noise patch has this length on average.
    """

    signals_KD: Tensor
    centers_KD: Tensor
    num_groups: int
    alpha: tuple[float, float]
    beta: tuple[float, float]
    gamma: tuple[float, float]
    noise_std: float

    @property
    def num_clusters(self) -> int:
        """K."""
        return self.signals_KD.shape[0]

    def draw(self, num_samples: int, generator: torch.Generator) -> ClusterSamples:
        """Draws samples; clusters and labels are equally likely.

        Args:
            num_samples: B.
            generator: Of everything that is drawn.
        """
        dims = self.signals_KD.shape[1]
        clusters_B = torch.randint(
            self.num_clusters, (num_samples,), generator=generator
        )
        per_group = self.num_clusters // self.num_groups
        step_B = torch.randint(1, per_group, (num_samples,), generator=generator)
        groups_B = clusters_B // per_group
        others_B = groups_B * per_group + (clusters_B + step_B) % per_group
        labels_B = _signs(num_samples, generator)
        noise_BD = torch.randn(num_samples, dims, generator=generator)
        parts = (
            self._scale(self.alpha, labels_B, generator) * self.signals_KD[clusters_B],
            self._scale(self.beta, torch.ones(num_samples), generator)
            * self.centers_KD[clusters_B],
            self._scale(self.gamma, _signs(num_samples, generator), generator)
            * self.signals_KD[others_B],
            self.noise_std / dims**0.5 * noise_BD,
        )
        patches_BPD = torch.stack(parts, dim=1)
        order_BP = torch.rand(num_samples, 4, generator=generator).argsort(dim=1)
        patches_BPD = patches_BPD.gather(
            1, order_BP.unsqueeze(2).expand_as(patches_BPD)
        )
        return ClusterSamples(patches_BPD, labels_B, clusters_B, groups_B)

    def _scale(
        self, bounds: tuple[float, float], signs_B: Tensor, generator: torch.Generator
    ) -> Tensor:
        low, high = bounds
        drawn_B = torch.rand(len(signs_B), generator=generator)
        return (signs_B * (low + (high - low) * drawn_B)).unsqueeze(1)


def draw_task(
    num_clusters: int,
    dims: int,
    generator: torch.Generator,
    *,
    num_groups: int = 1,
    alpha: tuple[float, float] = (0.5, 2.0),
    beta: tuple[float, float] = (1.0, 2.0),
    gamma: tuple[float, float] = (0.5, 3.0),
    noise_std: float = 1.0,
) -> ClusterTask:
    """Draws signals and centres, all orthonormal; the ranges are those of setting 1.

    Args:
        num_clusters: K.
        dims: D, at least 2K.
        generator: Of the directions.
        num_groups: See `ClusterTask`, like the rest.
        alpha: See there.
        beta: See there.
        gamma: See there.
        noise_std: See there.

    Raises:
        ValueError: If there are too few dimensions, or not the same number, two or
            more, of clusters in each group.
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
    gaussian = torch.randn(
        dims, 2 * num_clusters, generator=generator, dtype=torch.float64
    )
    directions = torch.linalg.qr(gaussian).Q.t().float()
    return ClusterTask(
        signals_KD=directions[:num_clusters],
        centers_KD=directions[num_clusters:],
        num_groups=num_groups,
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        noise_std=noise_std,
    )


def _signs(num_samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (num_samples,), generator=generator).float() * 2.0 - 1.0
