"""Modules that tell an image's dataset, and that use it without any experts.

Both start at zero and draw no random numbers: a detector with them starts as the same
detector without, and from the same weights.

Axes: B images, N tokens per image (padding included), D channels, G dataset groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DatasetHead(nn.Module):
    """Linear classifier of dataset groups on the mean of an image's features.

    What the routing loss of DAMEX teaches a router, for detectors that have none.

    Args:
        embed_dims: D.
        num_groups: G.
    """

    def __init__(self, embed_dims: int, num_groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_groups, embed_dims))
        self.bias = nn.Parameter(torch.zeros(num_groups))

    def forward(self, memory_BND: Tensor, padding_BN: Tensor | None) -> Tensor:
        """Score the groups.

        Args:
            memory_BND: Output of the encoder.
            padding_BN: True for padded features; None where none is.

        Returns:
            Logits (B, G), in float32 whatever autocast says.
        """
        with torch.autocast(memory_BND.device.type, enabled=False):
            memory_BND = memory_BND.to(self.weight.dtype)
            if padding_BN is None:
                mean_BD = memory_BND.mean(dim=1)
            else:
                real_BN1 = (~padding_BN).unsqueeze(2).to(memory_BND.dtype)
                mean_BD = (memory_BND * real_BN1).sum(dim=1) / real_BN1.sum(dim=1)
            return functional.linear(mean_BD, self.weight, self.bias)


def dataset_loss(logits_BG: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the groups, and how often the best one is right.

    Args:
        logits_BG: Of a :class:`DatasetHead`.
        group_ids_B: Group of every image; -1, where unknown, is left out.

    Returns:
        Loss and accuracy, means over the images of a known group; 0 without any.
    """
    count = (group_ids_B >= 0).sum().clamp_min(1)
    total = functional.cross_entropy(
        logits_BG, group_ids_B, ignore_index=-1, reduction="sum"
    )
    hits = (logits_BG.argmax(dim=1) == group_ids_B).sum()
    return total / count, hits / count


class DatasetConditioning(nn.Module):
    """Tells the decoder, and if asked the memory, which datasets an image looks like.

    One embedding per group is added to the content of all queries, weighted by the
    posterior; Detection Hub (Meng et al., CVPR 2023, arXiv 2206.03484) adapts queries
    by an embedding of the dataset, too. ``film`` also scales and shifts the memory per
    channel (FiLM, Perez et al., AAAI 2018, arXiv 1709.07871). A detector with it knows
    what dataset-aware experts know, and is what to compare them with.

    Args:
        embed_dims: D.
        num_groups: G.
        film: Whether to scale and shift the memory, too.
    """

    def __init__(self, embed_dims: int, num_groups: int, *, film: bool) -> None:
        super().__init__()
        self.query_GD = nn.Parameter(torch.zeros(num_groups, embed_dims))
        self.scale_GD: nn.Parameter | None = None
        self.shift_GD: nn.Parameter | None = None
        if film:
            self.scale_GD = nn.Parameter(torch.zeros(num_groups, embed_dims))
            self.shift_GD = nn.Parameter(torch.zeros(num_groups, embed_dims))

    def query(self, query_BND: Tensor, posterior_BG: Tensor) -> Tensor:
        """Add the datasets' embedding to queries.

        Args:
            query_BND: Content of the decoder's queries.
            posterior_BG: Probabilities of the groups for each image.
        """
        return query_BND + _mixed(posterior_BG, self.query_GD)

    def memory(self, memory_BND: Tensor, posterior_BG: Tensor) -> Tensor:
        """Scale and shift the memory; without ``film`` it stays as it is.

        Args:
            memory_BND: Output of the encoder.
            posterior_BG: Probabilities of the groups for each image.
        """
        if self.scale_GD is None or self.shift_GD is None:
            return memory_BND
        scale_B1D = 1.0 + _mixed(posterior_BG, self.scale_GD)
        return memory_BND * scale_B1D + _mixed(posterior_BG, self.shift_GD)


def _mixed(posterior_BG: Tensor, rows_GD: Tensor) -> Tensor:
    """Mean of the groups' rows for each image, as (B, 1, D)."""
    return (posterior_BG @ rows_GD).unsqueeze(1)
