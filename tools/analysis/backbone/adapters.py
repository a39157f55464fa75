"""A detector with adapters in its backbone, to measure whether they gain.

Behind each chosen block of a timm backbone: a scale, a shift and a linear map of low
rank, all zero at the start. Every image uses the adapters of its dataset, which is
given, also in an evaluation (an oracle). It is not an option of damex: the class exists
for the measurement in docs/research/results.md, and ``arms.py`` lists its arms.

Axes: B images, C channels, H rows, W columns, G datasets, L rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from mmdet.registry import MODELS
from torch import Tensor, nn

from damex.models.detectors import MoEDINO
from damex.models.queries import ids_of
from damex.models.starts import fork_rng


class Adapter(nn.Module):
    """Add ``x * scale + shift + x down up`` of an image's dataset to a feature map.

    Args:
        datasets: Number of adapters; 1 is shared by all images.
        channels: Channels of the map.
        rank: Rank of the linear map, 0 for none; None for channels / 16, at least 4.
    """

    def __init__(self, datasets: int, channels: int, rank: int | None) -> None:
        super().__init__()
        rank = max(4, channels // 16) if rank is None else rank
        self.scale_GC = nn.Parameter(torch.zeros(datasets, channels))
        self.shift_GC = nn.Parameter(torch.zeros(datasets, channels))
        down_GCL = torch.empty(datasets, channels, rank)
        bound = channels**-0.5
        self.down_GCL = nn.Parameter(nn.init.uniform_(down_GCL, -bound, bound))
        self.up_GLC = nn.Parameter(torch.zeros(datasets, rank, channels))

    def forward(self, maps_BCHW: Tensor, ids_B: Tensor) -> Tensor:
        """Return the adapted map; `ids_B` are the datasets of the images."""
        size = maps_BCHW.shape
        pixels_BNC = maps_BCHW.permute(0, 2, 3, 1).flatten(1, 2)
        added = pixels_BNC * self.scale_GC[ids_B, None] + self.shift_GC[ids_B, None]
        added = added + pixels_BNC @ self.down_GCL[ids_B] @ self.up_GLC[ids_B]
        sum_BNC = pixels_BNC + added
        return sum_BNC.unflatten(1, (size[2], size[3])).permute(0, 3, 1, 2)


@MODELS.register_module()
class AdaptedDINO(MoEDINO):
    """:class:`MoEDINO` with adapters behind the blocks of an EfficientNet of timm.

    Args:
        adapters: ``datasets`` and ``rank`` of :class:`Adapter`; ``stages``, the indices
            of the adapted stages; ``offset``, added to each image's dataset, to see
            what the adapters of another dataset do.
        *args, **kwargs: See :class:`MoEDINO`.
    """

    def __init__(
        self, *args: Any, adapters: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        options: dict[str, Any] = dict(
            datasets=1, rank=None, stages=(3, 4, 5, 6), offset=0
        )
        options.update(adapters or {})
        self._offset: int = options["offset"]
        # Not inside of the backbone, whose learning rate is lower.
        self.adapters = nn.ModuleList()
        self._ids_B: Tensor | None = None
        net = cast(Any, self.backbone).net
        with fork_rng():
            for stage in options["stages"]:
                for block in net.blocks[stage]:
                    channels = last_convolution(block).out_channels
                    adapter = Adapter(options["datasets"], channels, options["rank"])
                    self.adapters.append(adapter)
                    block.register_forward_hook(partial(self._adapt, adapter))

    def _adapt(self, adapter: Adapter, _: nn.Module, __: Any, maps: Tensor) -> Tensor:
        assert self._ids_B is not None
        return adapter(maps, (self._ids_B + self._offset) % len(adapter.scale_GC))

    def _set_datasets(self, samples: Sequence[Any], images: Tensor) -> None:
        self._ids_B = ids_of(samples, "group_id", images.device)

    def loss(self, batch_inputs: Tensor, batch_data_samples: list) -> dict:
        """Compute the losses, with the adapters of each image's dataset."""
        self._set_datasets(batch_data_samples, batch_inputs)
        return super().loss(batch_inputs, batch_data_samples)

    def predict(
        self, batch_inputs: Tensor, batch_data_samples: list, rescale: bool = True
    ) -> list:
        """Predict, with the adapters of each image's dataset."""
        self._set_datasets(batch_data_samples, batch_inputs)
        return super().predict(batch_inputs, batch_data_samples, rescale)


def last_convolution(block: nn.Module) -> nn.Conv2d:
    """Return the last convolution of a block, which has its output channels."""
    return [m for m in block.modules() if isinstance(m, nn.Conv2d)][-1]
