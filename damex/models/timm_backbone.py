"""TimmBackbone: any feature pyramid of timm as the backbone of a detector.

Axes: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mmdet.registry import MODELS
from mmengine.logging import print_log
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from damex.errors import ConfigError, did_you_mean

# What models of a fixed image size are told, so that they take any: windows, patches.
ANY_SIZE = ("strict_img_size", False), ("dynamic_img_size", True)


@MODELS.register_module()
class TimmBackbone(BaseModule):
    """The feature maps of a timm model.

    In a config::

        backbone=dict(type='TimmBackbone', name='convnext_tiny', out_indices=(1, 2, 3),
                      checkpoint='convnext_tiny.safetensors'),
        neck=dict(in_channels=[192, 384, 768]),

    timm counts feature maps from the one of the highest resolution: ConvNeXt and Swin
    have strides 4, 8, 16, 32 at indices 0 to 3, ResNets 2, 4, 8, 16, 32 at 0 to 4.
    Images are padded with zeros to whole strides, and the maps cut back to
    ceil(size / stride), so that every image size works.

    Args:
        name: Name of the model, as in ``timm.list_models()``.
        out_indices: Which feature maps to hand on, in rising order.
        pretrained: Start a training from timm's weights for this name, downloaded.
        checkpoint: File of weights to start a training from instead:
            ``.safetensors``, or a ``.pth`` of tensors, which is read without running
            any code of it. Keys are those of the timm model; what no layer takes (a
            classifier) is reported.
        frozen_stages: Everything up to this feature map is not trained, batch norms
            included; -1 for nothing. For ResNets that is mmdet's meaning: 0 the stem, 1
            also the first stage.
        norm_eval: Keep the statistics of all batch norms as they are.
        **options: For ``timm.create_model``, for instance ``drop_path_rate=0.1``.

    Attributes:
        channels: Channels of each map.
        reductions: Stride of each map in pixels.

    Starting weights are read by :meth:`init_weights`, which mmengine calls before a
    training: to test or to count a detector neither the file nor a network is needed.

    Raises:
        ConfigError: If timm has no such model, or a map does not exist.
    """

    def __init__(
        self,
        name: str,
        *,
        out_indices: Sequence[int] = (1, 2, 3),
        pretrained: bool = False,
        checkpoint: str | None = None,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if pretrained and checkpoint is not None:
            raise ConfigError(
                "TimmBackbone: pretrained=True and checkpoint="
                f"{checkpoint!r} exclude each other; keep one of them."
            )
        self.name = name
        self.norm_eval = norm_eval
        self.out_indices = tuple(out_indices)
        self.net = _create(name, self.out_indices, **options)
        self._pretrained, self._checkpoint = pretrained, checkpoint
        self._options = options
        info: Any = self.net.feature_info
        self.channels: list[int] = info.channels()
        self.reductions: list[int] = info.reduction()
        # An enum of text; a few families do not have it and keep channels first.
        self._channels_last = getattr(self.net, "output_fmt", "NCHW") == "NHWC"
        self.frozen_stages = frozen_stages
        self._frozen = list(_first_modules(self.net, frozen_stages, model=name))
        for module in self._frozen:
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)

    def init_weights(self) -> None:
        """Load the starting weights, if any; others timm has drawn already.

        Raises:
            ConfigError: If timm has no weights of this name, or the file does not hold
                this model's.
        """
        if self._checkpoint is not None:
            _load(self.net, Path(self._checkpoint), name=self.name)
        elif self._pretrained:
            options = self._options | {"pretrained": True}
            source = _create(self.name, self.out_indices, **options)
            self.net.load_state_dict(source.state_dict())

    def train(self, mode: bool = True) -> TimmBackbone:
        """Switch to training, but for frozen stages and norms."""
        super().train(mode)
        for module in self._frozen:
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
        maps = self.net(padded)
        if self._channels_last:
            maps = [one.permute(0, 3, 1, 2) for one in maps]
        return tuple(
            one[..., : -(-height // stride), : -(-width // stride)].contiguous()
            for one, stride in zip(maps, self.reductions, strict=True)
        )


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


def _create(name: str, indices: tuple[int, ...], **options: Any) -> nn.Module:
    """The timm model, told to take any image size where it has a say in that."""
    import timm  # takes seconds, which a detector without it need not wait for

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
            f"TimmBackbone: timm cannot make {name!r} as a backbone with {options}: "
            f"{words} (options of an inherited backbone go away by _delete_=True)"
        ) from error


def _any_size(name: str, **options: Any) -> nn.Module:
    import timm

    options["features_only"] = True
    for option, value in ANY_SIZE:
        try:
            return timm.create_model(name, **{option: value, **options})
        except TypeError as error:
            if option not in str(error):
                raise
    return timm.create_model(name, **options)


def _load(net: nn.Module, path: Path, *, name: str) -> None:
    """Load weights of a full timm model into its feature maps, or refuse the file.

    timm's own loading into feature maps keeps random weights for what a file lacks.
    """
    from timm.models import load_state_dict

    if not path.is_file():
        raise ConfigError(
            f"TimmBackbone: there is no checkpoint file {path} (seen from "
            f"{Path.cwd()})."
        )
    try:
        state = load_state_dict(str(path), use_ema=False, weights_only=True)
    except Exception as error:  # what a reader says of a broken file is its own
        raise ConfigError(
            f"TimmBackbone: {path} cannot be read as a file of tensors "
            f"({type(error).__name__}); a file that needs more than tensors is "
            "refused, as reading it would run code."
        ) from error
    own = net.state_dict()
    given = {_own_name(key, own): value for key, value in state.items()}
    missing = sorted(set(own) - set(given))
    known = set(own) & set(given)
    wrong = [k for k in known if getattr(given[k], "shape", None) != own[k].shape]
    if missing or wrong:
        raise ConfigError(
            f"TimmBackbone: {path} does not hold the weights of {name!r}: "
            f"{len(missing)} of {len(own)} tensors are missing {missing[:3]} and "
            f"{len(wrong)} have another shape {sorted(wrong)[:3]}; save timm's "
            "model.state_dict() of this model."
        )
    unused = net.load_state_dict(given, strict=False).unexpected_keys
    if unused:
        print_log(
            f"{path}: {len(unused)} tensors are of no use to the backbone, such as "
            f"{sorted(unused)[:3]}.",
            logger="current",
            level=logging.INFO,
        )


def _own_name(key: str, own: Mapping[str, Tensor]) -> str:
    """The name under which timm's feature maps keep a tensor of the full model.

    They write 'stages_0.' for 'stages.0.', or wrap the whole model (ViTs).
    """
    names = (key, key.replace(".", "_", 1), f"model.{key}")
    return next((name for name in names if name in own), key)


def _first_modules(net: nn.Module, last: int, *, model: str) -> Iterator[nn.Module]:
    """All modules up to the one that makes feature map number ``last``."""
    if last == -1:
        return
    info: Any = net.feature_info
    makers = [one["module"] for one in info.info]  # of all maps, not only those kept
    names = [module for module, _ in net.named_modules()]
    if type(last) is not int or not 0 <= last < len(makers):
        raise ConfigError(
            "TimmBackbone: frozen_stages must be -1 for none or from 0 to "
            f"{len(makers) - 1} for {model!r}, got {last!r}."
        )
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
