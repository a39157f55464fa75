"""Checkpoints: loaded as data, never as code, and checked against the mixture."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from torch import nn

from damex.datasets.label_space import LabelSpace
from damex.errors import ConfigError, DataError

__all__ = ["check_label_space", "check_tensors", "load_checkpoint_safely"]


def _history_method(owner: Any, name: str) -> Any:
    """What ``getattr`` may fetch: the statistics of mmengine's ``HistoryBuffer``.

    mmengine pickles them as ``getattr(HistoryBuffer, 'min')``. The real ``getattr``
    would hand a stranger's file every attribute of every allowed class.
    """
    if owner is not HistoryBuffer or name not in ("min", "max", "mean", "current"):
        raise pickle.UnpicklingError(f"the file asks for {owner!r}.{name}.")
    return getattr(owner, name)


def _allowed() -> list[Any]:
    """Classes that mmengine writes into a checkpoint and that only hold data."""
    core = getattr(np, "_core", None) or np.core
    dtypes = {
        type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i4", "i8", "u8", "?")
    }
    return [
        HistoryBuffer,
        np.ndarray,
        np.dtype,
        core.multiarray._reconstruct,
        core.multiarray.scalar,
        *dtypes,
        (_history_method, "builtins.getattr"),
    ]


def load_checkpoint_safely(path: str | Path, *, map_location: Any = "cpu") -> dict:
    """Load a checkpoint of mmengine without running anything that it contains.

    Args:
        path: A local file, or an http(s) address, which is downloaded once.
        map_location: As for ``torch.load``.

    Returns:
        The checkpoint.

    Raises:
        DataError: If the file is missing, is no checkpoint, is damaged, or holds more
            than data.
    """
    file = _local_file(str(path))
    if not zipfile.is_zipfile(file):
        raise DataError(
            f"{file} ({file.stat().st_size} bytes) is not a checkpoint of torch, or is "
            "cut off. Use an earlier one, or fetch it again."
        )
    try:
        with torch.serialization.safe_globals(_allowed()):
            checkpoint = torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"the checkpoint {file} holds more than tensors and plain values, and was "
            "not loaded: it could run code. If you trust where it comes from, load it "
            "yourself and save its 'state_dict' with torch.save."
        ) from error
    except (EOFError, RuntimeError) as error:
        raise DataError(
            f"the checkpoint {file} ({file.stat().st_size} bytes) cannot be read: "
            f"{str(error).splitlines()[0]} Use an earlier one, or fetch it again."
        ) from error
    if not isinstance(checkpoint, dict):
        raise DataError(
            f"the checkpoint {file} holds a {type(checkpoint).__name__}, not the dict "
            "of tensors that a detector needs."
        )
    return checkpoint


def _local_file(path: str) -> Path:
    """The file itself, or the local copy of an address."""
    if path.startswith(("http://", "https://")):
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        copy = folder / path.rsplit("/", 1)[-1]
        if not copy.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(path, str(copy))
        return copy
    if not Path(path).is_file():
        raise DataError(
            f"there is no checkpoint {path} (seen from {Path.cwd()}); look into the "
            "work directory for *.pth files."
        )
    return Path(path)


def check_tensors(
    checkpoint: Mapping[str, Any], model: nn.Module, *, path: str
) -> None:
    """Refuse a checkpoint that does not hold exactly the tensors of a model.

    Args:
        checkpoint: A checkpoint, or a state dict alone.
        model: The detector that the config builds.
        path: The checkpoint, for the message.

    Raises:
        ConfigError: If tensors are missing or too many.
    """
    stored = checkpoint.get("state_dict", checkpoint)
    found = {key.removeprefix("module.") for key in stored}
    needed = set(model.state_dict())
    missing, surplus = sorted(needed - found), sorted(found - needed)
    if missing or surplus:
        raise ConfigError(
            f"the checkpoint {path} is of another detector than the config: "
            f"{len(missing)} tensors are missing (such as {missing[:1]}), "
            f"{len(surplus)} are too many (such as {surplus[:1]}). Use the config that "
            "lies beside the checkpoint, with the same moe=..."
        )


def check_label_space(meta: Mapping[str, Any], space: LabelSpace, *, path: str) -> None:
    """Refuse a checkpoint whose classes or groups mean something else.

    Args:
        meta: ``checkpoint['meta']``.
        space: The label space of the config.
        path: The checkpoint, for the message.

    Raises:
        ConfigError: If both know a mixture and the two differ.
    """
    stored = meta.get("dataset_meta") or {}
    if "datasets" not in stored:
        return
    trained = LabelSpace.from_metainfo(stored)
    if trained.classes != space.classes:
        raise ConfigError(
            f"the checkpoint {path} was trained on {trained.num_classes} classes of "
            f"{', '.join(trained.dataset_names)}, the config's mixture has "
            f"{space.num_classes} of {', '.join(space.dataset_names)}; labels would "
            "mean something else. Use the config that the checkpoint was trained with "
            "(it lies beside the checkpoint in the work directory)."
        )
    if trained.groups != space.groups:
        raise ConfigError(
            f"the checkpoint {path} was trained with the dataset groups "
            f"{list(trained.groups)}, the config has {list(space.groups)}; set the "
            "same group='...' in the mixture entries."
        )
