"""The checkpoints that are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from damex.datasets.label_space import LabelSpace
from damex.inference.writing import make_folder


def write_checkpoint(
    path: Path,
    state: Mapping[str, Tensor],
    *,
    text: str,
    space: LabelSpace,
    moe: Mapping[str, Any],
) -> None:
    """Write a checkpoint as a training does, to predict with or to start from.

    Args:
        path: Its folder is made.
        state: Weights by their names.
        text: The config.
        space: The datasets and their classes.
        moe: The resolved ``moe`` tree.
    """
    make_folder(path.parent)
    meta = dict(cfg=text, dataset_meta=space.to_metainfo(), moe=dict(moe))
    torch.save(dict(meta=meta, state_dict=dict(state)), path)
