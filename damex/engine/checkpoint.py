"""Checkpoints: loaded as data, never as code, and checked against the mixture."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

from damex.datasets.label_space import LabelSpace
from damex.errors import ConfigError, DataError

__all__ = ["check_label_space", "load_checkpoint_safely"]


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
        path: A local file.
        map_location: As for ``torch.load``.

    Returns:
        The checkpoint.

    Raises:
        DataError: If the file is missing, is damaged, or holds more than data.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(
            f"there is no checkpoint {file} (seen from {Path.cwd()}); look into the "
            "work directory for *.pth files."
        )
    try:
        with torch.serialization.safe_globals(_allowed()):
            checkpoint = torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"the checkpoint {file} holds more than tensors and plain values, and was "
            f"not loaded: {str(error).splitlines()[0]} If you trust where it comes "
            "from, load it yourself and save its 'state_dict' with torch.save."
        ) from error
    except (EOFError, RuntimeError) as error:
        raise DataError(
            f"the checkpoint {file} ({file.stat().st_size} bytes) cannot be read: "
            f"{str(error).splitlines()[0]} It may be cut off; use an earlier one."
        ) from error
    return checkpoint


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
