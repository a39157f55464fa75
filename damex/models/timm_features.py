"""timm's feature extractors: created for any image size, and cut at a feature map.

Axes: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn

from damex.errors import ConfigError, did_you_mean

# Make models of a fixed image size (windows, patches) accept any.
ANY_SIZE = ("strict_img_size", False), ("dynamic_img_size", True)


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


def modules_up_to(net: nn.Module, last: int, *, model: str) -> Iterator[nn.Module]:
    """Yield all modules up to the one of feature map number ``last``; -1 for none.

    Raises:
        ConfigError: If ``net`` does not compute that map.
    """
    if last == -1:
        return
    info: Any = net.feature_info
    makers = [one["module"] for one in info.info]  # of all maps, including dropped ones
    names = [module for module, _ in net.named_modules()]
    if type(last) is not int or not 0 <= last < len(makers):
        raise ConfigError(
            "TimmBackbone: frozen_stages must be -1 for none or from 0 to "
            f"{len(makers) - 1} for {model!r}, got {last!r}."
        )
    targets = _names_of(makers[last]) & set(names)
    if not targets:
        raise ConfigError(
            f"TimmBackbone: frozen_stages={last} is beyond the feature maps of "
            f"{model!r} that out_indices keeps; lower it."
        )
    (target,) = targets
    inside = [name for name in names if f"{name}.".startswith(f"{target}.")]
    yield from islice(net.modules(), names.index(inside[-1]) + 1)


def _names_of(maker: str) -> set[str]:
    """Return the possible names of a full model's module in timm's extractors."""
    return {maker, maker.replace(".", "_"), f"model.{maker}"}


class Step(NamedTuple):
    """A module of a chain."""

    module: nn.Module
    kept: bool  # whether its output is a feature map


def run_steps(steps: Sequence[Step], tensor: Tensor) -> tuple[list[Tensor], Tensor]:
    """Run steps in order; return the feature maps and the last module's output."""
    maps = []
    for step in steps:
        tensor = step.module(tensor)
        if step.kept:
            maps.append(tensor)
    return maps, tensor


def cut(net: nn.Module, last: int, *, model: str) -> tuple[list[Step], list[Step]]:
    """Cut a feature extractor after feature map number ``last``.

    Run one after the other, the two parts compute the maps of ``net``.

    Raises:
        ConfigError: If ``net`` is not a known chain of modules.
    """
    names, steps = zip(*(_chain(net) or {"": Step(net, False)}).items(), strict=True)
    info: Any = net.feature_info
    targets = _names_of(info.info[last]["module"]) & set(names)
    if not targets:
        raise ConfigError(
            f"TimmBackbone: cache_mib cannot cut {model!r} ({type(net).__name__}) in "
            "two; it knows ResNets, ConvNeXts, EfficientNets and what timm builds like "
            "them. Leave cache_mib out."
        )
    (target,) = targets
    place = names.index(target) + 1
    return list(steps[:place]), list(steps[place:])


def _chain(net: Any) -> dict[str, Step]:
    """Return the modules that ``net`` runs in sequence; empty if unknown."""
    from timm.models import EfficientNetFeatures, FeatureListNet

    if type(net) is EfficientNetFeatures and net.feature_hooks is None:
        kept = {one["stage"] for one in net.feature_info.get_dicts()}
        stem = {
            "conv_stem": Step(net.conv_stem, False),
            "bn1": Step(net.bn1, 0 in kept),
        }
        return stem | {
            f"blocks.{number}": Step(stage, number + 1 in kept)
            for number, stage in enumerate(net.blocks)
        }
    if type(net) is FeatureListNet and not net.concat:
        return {
            name: Step(module, name in net.return_layers)
            for name, module in net.items()
        }
    return {}
