"""Modules that predict an image's dataset, and that use it without experts.

Both are zero-initialized and draw no random numbers, so the other weights start the
same with and without them.

Axes: B images, N tokens (padding included), D channels, G dataset groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DatasetHead(nn.Module):
    """Linear classifier of dataset groups on the mean of an image's features.

    It learns what DAMEX's routing loss teaches a router, for detectors without routers.
    """

    def __init__(self, embed_dims: int, num_groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_groups, embed_dims))
        self.bias = nn.Parameter(torch.zeros(num_groups))

    def forward(self, memory_BND: Tensor, padding_BN: Tensor | None) -> Tensor:
        """Return float32 logits (B, G), even under autocast; True marks padding."""
        with torch.autocast(memory_BND.device.type, enabled=False):
            memory_BND = memory_BND.to(self.weight.dtype)
            if padding_BN is None:
                mean_BD = memory_BND.mean(dim=1)
            else:
                real_BN1 = (~padding_BN).unsqueeze(2).to(memory_BND.dtype)
                mean_BD = (memory_BND * real_BN1).sum(dim=1) / real_BN1.sum(dim=1)
            return functional.linear(mean_BD, self.weight, self.bias)


def dataset_loss(logits_BG: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy and the accuracy of dataset logits.

    Both are means over images of a known group (not -1); 0 without any.
    """
    count = (group_ids_B >= 0).sum().clamp_min(1)
    total = functional.cross_entropy(
        logits_BG, group_ids_B, ignore_index=-1, reduction="sum"
    )
    hits = (logits_BG.argmax(dim=1) == group_ids_B).sum()
    return total / count, hits / count


class DatasetConditioning(nn.Module):
    """Conditions the queries, and with ``film`` the memory, on predicted datasets.

    One embedding per group, weighted by the posterior, is added to the content of all
    queries; compare Detection Hub (Meng et al., CVPR 2023, arXiv 2206.03484). ``film``
    scales and shifts the memory per channel (FiLM, Perez et al., AAAI 2018, arXiv
    1709.07871). A baseline with the same information as dataset-aware experts.
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
        """Add the posterior-weighted dataset embedding to the queries' content."""
        return query_BND + _mixed(posterior_BG, self.query_GD)

    def memory(self, memory_BND: Tensor, posterior_BG: Tensor) -> Tensor:
        """Scale and shift the encoder's output; unchanged without ``film``."""
        if self.scale_GD is None or self.shift_GD is None:
            return memory_BND
        scale_B1D = 1.0 + _mixed(posterior_BG, self.scale_GD)
        return memory_BND * scale_B1D + _mixed(posterior_BG, self.shift_GD)


def _mixed(posterior_BG: Tensor, rows_GD: Tensor) -> Tensor:
    """Return the posterior-weighted mean of the groups' rows, (B, 1, D)."""
    return (posterior_BG @ rows_GD).unsqueeze(1)
