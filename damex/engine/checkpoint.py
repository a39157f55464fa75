"""Loading checkpoints as data, never as code, and checking them against the config."""

from __future__ import annotations

import functools
import hashlib
import pickle
import re
import struct
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlparse

import numpy as np
import torch
from mmengine import runner as mmengine_runner
from mmengine.dist import barrier, is_main_process
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader
from torch import nn

from damex.datasets.label_space import LabelSpace
from damex.engine.model_folder import is_model_folder, read_model_folder
from damex.errors import ConfigError, DataError
from damex.models.build import moe_difference
from damex.models.detectors import RoutedDetector

WRAPPER = "module."
ALLOWING = threading.RLock()  # torch's list of allowed classes is global
# IndexError and struct.error: truncated files of torch before 1.6; KeyError: a name
# that a scheme such as torchvision:// does not know.
UNREADABLE = (EOFError, RuntimeError, URLError, IndexError, KeyError, struct.error)


def load_checkpoints_as_data() -> None:
    """Make all loaders of mmengine reject files that hold more than data.

    They serve ``load_from``, ``--resume``, ``init_cfg``, ``init_detector`` and the
    inferencers, for files and URLs of every scheme; mmengine would execute a file that
    torch refuses to load as data. Not covered: ``DetInferencer(weights=...)`` without a
    config runs the config text in a checkpoint as Python.

    An explicit ``weights_only`` overrides ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD``.
    """
    # mmengine's other loaders call torch through these two functions.
    of_mmengine: Any = mmengine_runner.checkpoint
    of_mmengine._safe_torch_load = functools.partial(torch.load, weights_only=True)
    of_mmengine.load_url = functools.partial(
        torch.hub.load_state_dict_from_url, weights_only=True
    )
    loaders = {**CheckpointLoader._schemes, "": load_from_local}
    loaders |= dict.fromkeys(("http://", "https://"), load_from_http)
    for prefix, loader in loaders.items():
        CheckpointLoader.register_scheme(prefix, _as_data(loader), force=True)


def load_from_local(path: str, map_location: Any = None) -> Any:
    """Load a local file, or a folder of damex card; DataError if it is damaged."""
    file = Path(path).expanduser()
    if is_model_folder(file):
        return read_model_folder(file)
    if not file.is_file():
        names = sorted(one.name for one in file.glob("*.pth"))[-3:]
        known = f"in it: {', '.join(names)}" if names else "of a work directory"
        problem = "is a folder" if file.is_dir() else f"is missing in {Path.cwd()}"
        raise DataError(f"the checkpoint {path} {problem}; name a .pth file {known}.")
    with file.open("rb") as content:
        is_pickle = content.read(1) == b"\x80"  # before torch 1.6
    if not is_pickle and not zipfile.is_zipfile(file):
        raise DataError(
            f"{path} ({file.stat().st_size} bytes) is not a checkpoint of torch, or is "
            "cut off. Use an earlier one, or fetch it again."
        )
    return torch.load(file, map_location=map_location, weights_only=True)


def load_from_http(address: str, map_location: Any = None) -> Any:
    """Load from the web, downloaded once per URL by the main process.

    A hash in the file name (``dino-0123abcd.pth``) is checked against the content.
    """
    name = Path(urlparse(address).path).name
    # Equal names from two URLs are different files.
    folder = hashlib.sha256(address.encode()).hexdigest()[:16]
    fetch = functools.partial(
        torch.hub.load_state_dict_from_url,
        address,
        model_dir=str(Path(torch.hub.get_dir()) / "checkpoints" / folder),
        map_location=map_location,
        check_hash=re.search(r"-[0-9a-f]{8,64}\.", name) is not None,
        weights_only=True,
    )
    checkpoint = fetch() if is_main_process() else None
    barrier()
    return fetch() if checkpoint is None else checkpoint


def _as_data(loader: Callable[[str, Any], Any]) -> Callable[..., dict]:
    """Wrap a loader of mmengine: no code from files, and one-line errors."""

    @functools.wraps(loader)
    def load(path: str, map_location: Any = None) -> dict:
        try:
            with ALLOWING, _allowed():
                checkpoint = loader(path, map_location)
        except pickle.UnpicklingError as error:
            raise DataError(
                f"the checkpoint {path} holds more than tensors and plain values, or "
                "is cut off. It was not loaded, as it could run code. If you trust "
                "its source, load it yourself and save its 'state_dict' with "
                "torch.save."
            ) from error
        except UNREADABLE as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise DataError(
                f"the checkpoint {path} cannot be read ({reason}); use an earlier one, "
                "or fetch it again."
            ) from error
        if not isinstance(checkpoint, dict):
            raise DataError(
                f"the checkpoint {path} holds a {type(checkpoint).__name__}, not the "
                "dict of tensors that a detector needs."
            )
        state = checkpoint.get("state_dict", checkpoint)
        parts = dict(state_dict=state, meta=checkpoint.get("meta") or {})
        for key, part in parts.items():
            if not isinstance(part, dict):
                raise DataError(
                    f"the checkpoint {path} is damaged: its {key} is not a dict."
                )
        if all(str(key).startswith(WRAPPER) for key in state):  # saved from DDP
            for key in [*state]:
                state[key.removeprefix(WRAPPER)] = state.pop(key)
        return checkpoint

    return load


def _allowed() -> Any:
    """Allow the classes that mmengine writes into a checkpoint; they only hold data."""
    core = getattr(np, "_core", None) or np.core
    # By the names of numpy 1 and of numpy 2: a file may come from the other one.
    readers = [
        (getattr(core.multiarray, name), f"numpy.{package}.multiarray.{name}")
        for package in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ]
    kinds = ("f2", "f4", "f8", "i4", "i8", "u8", "?")
    return torch.serialization.safe_globals(
        [
            HistoryBuffer,
            np.ndarray,
            np.dtype,
            *readers,
            *{type(np.dtype(kind)) for kind in kinds},
            (_history_method, "builtins.getattr"),
        ]
    )


def _history_method(owner: Any, name: str) -> Any:
    """Restrict ``getattr`` to the statistics of mmengine's ``HistoryBuffer``.

    mmengine pickles them as ``getattr(HistoryBuffer, 'min')``. The real ``getattr``
    would give an untrusted file every attribute of every allowed class.
    """
    if owner is not HistoryBuffer or name not in ("min", "max", "mean", "current"):
        raise pickle.UnpicklingError(f"the file asks for {owner!r}.{name}.")
    return getattr(owner, name)


def check_fit(
    checkpoint: Mapping[str, Any],
    model: nn.Module,
    space: LabelSpace | None,
    *,
    path: str,
) -> str | None:
    """Check that a checkpoint to resume or evaluate belongs to a detector.

    Returns:
        A note if ``moe`` differs although all tensors fit (some gates and losses have
        no parameters), else None.

    Raises:
        ConfigError: If its labels mean something else, or its tensors do not fit.
    """
    meta = checkpoint.get("meta") or {}
    if space is not None:
        check_label_space(meta, space, path=path)
    check_tensors(checkpoint, model, path=path)
    if not isinstance(model, RoutedDetector) or "moe" not in meta:
        return None
    note = moe_difference(meta["moe"], model.resolved_moe())
    return note and f"the checkpoint had other experts: {note}."


def not_finite(state: Mapping[str, Any]) -> list[str]:
    """Names of the tensors of a state dict that are not finite."""
    return [
        key
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and not value.isfinite().all()
    ]


def check_finite(state: Mapping[str, Any], *, path: str) -> None:
    """Raise ConfigError if a tensor of a state dict is not finite."""
    if broken := not_finite(state):
        raise ConfigError(
            f"{len(broken)} of {len(state)} tensors in {path} have values that are nan "
            f"or infinite, such as {', '.join(broken[:3])}: the training diverged. Use "
            "an earlier checkpoint, or train again with a lower learning rate."
        )


def check_tensors(
    checkpoint: Mapping[str, Any], model: nn.Module, *, path: str
) -> None:
    """Raise ConfigError unless a checkpoint has exactly the tensors of a model."""
    stored = checkpoint.get("state_dict", checkpoint)
    found, needed = stored.keys(), model.state_dict().keys()
    counts = {
        "are missing": sorted(needed - found),
        "are unknown": sorted(found - needed),
        "have another shape": [*_misfits(stored, model).values()],
    }
    problems = [
        f"{len(names)} tensors {what} (such as {names[0]})"
        for what, names in counts.items()
        if names
    ]
    if problems:
        raise ConfigError(
            f"the checkpoint {path} is of another detector than the config: "
            f"{', '.join(problems)}. Use the config in the work directory of the "
            "checkpoint, with the same moe=..."
        )


def replace_misfits(state: dict[str, Any], model: nn.Module) -> str | None:
    """Replace tensors of other shapes by the model's; return a warning if any."""
    misfits, new = _misfits(state, model), model.state_dict()
    state.update({key: new[key] for key in misfits})
    if not misfits:
        return None
    return (
        f"{len(misfits)} of {len(state)} tensors have another shape than in "
        f"the detector and are not loaded, such as {next(iter(misfits.values()))}; "
        "they start from random values."
    )


def _misfits(state: Mapping[str, Any], model: nn.Module) -> dict[str, str]:
    """Return the keys of tensors whose shapes differ, with both shapes in words."""
    return {
        key: f"{key} of {tuple(state[key].shape)}, here {tuple(new.shape)}"
        for key, new in model.state_dict().items()
        if key in state and state[key].shape != new.shape
    }


def check_label_space(meta: Mapping[str, Any], space: LabelSpace, *, path: str) -> None:
    """Raise ConfigError if a checkpoint's classes or groups differ from the config's.

    A checkpoint without a mixture passes. `meta` is ``checkpoint['meta']``.
    """
    stored = meta.get("dataset_meta") or {}
    if "datasets" not in stored:
        return
    trained = LabelSpace.from_metainfo(stored)
    pairs: list[tuple[str, Any, Any]] = [
        ("classes", trained.classes, space.classes),
        ("dataset groups", trained.groups, space.groups),
    ]
    for name in set(trained.dataset_names) & set(space.dataset_names):
        then = trained.dataset_classes[trained.dataset_id(name)]
        now = space.dataset_classes[space.dataset_id(name)]
        both = sorted(then.keys() & now.keys())
        pairs += [(f"class of {name}'s {k!r}", then[k], now[k]) for k in both]
    for what, before, value in pairs:
        if before != value:
            raise ConfigError(
                f"the checkpoint {path} was trained with other labels; {what}: "
                f"{_difference(before, value)}. Use the config in the work directory "
                "of the checkpoint, or its mixture (with rename and group) and "
                "label_space."
            )


def _difference(before: Any, now: Any) -> str:
    """Say how labels differ, by those that do."""
    if isinstance(before, str) or not isinstance(before, Sequence):
        return f"was {before!r}, is {now!r} in the config"
    sides = {"the checkpoint": (before, now), "the config": (now, before)}
    parts = []
    for side, (own, other) in sides.items():
        names = [str(one) for one in own if one not in other]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        if names:
            parts.append(f"only in {side}: {', '.join(names[:8])}{more}")
    if parts:
        return "; ".join(parts)
    place = next(i for i in count() if before[i : i + 1] != now[i : i + 1])
    one, other = (list(side[place : place + 1]) for side in (before, now))
    return f"place {place} was {one}, is {other} in the config"
