"""A config from dataset folders alone: ``damex train --data FOLDER...``.

Imports nothing heavy: the command line shows the models in its help.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from damex.errors import ConfigError, check_known

if TYPE_CHECKING:
    from mmengine.config import Config


class ShippedModel(NamedTuple):
    """A detector that comes with damex."""

    config: str
    parameters: float  # in millions, without experts
    needs: str  # recommended hardware, and the source of the initial weights
    name: str | None = None  # on the Hugging Face hub, of one of Transformers


def _of_hub(parameters: float, name: str) -> ShippedModel:
    return ShippedModel("hf/finetune_640", parameters, NEEDS_OF_HUB, name)


MAX_NAME = 60  # of a work directory, in characters
NEEDS_OF_HUB = "a GPU; damex[hf], COCO weights, downloaded"
MODELS: Mapping[str, ShippedModel] = {
    "tiny": ShippedModel(
        "damex-dino-tiny_efficientnet-lite0_1xb8-4e_coco-voc",
        4.5,
        "a CPU; ImageNet weights of damex[pretrained]",
    ),
    "rtdetr-v2-tiny": ShippedModel(
        "hf/rt-detr-v2-tiny_efficientnet-lite0_1xb8-4e_coco-voc",
        5.3,
        "a CPU; damex[hf], ImageNet weights of damex[pretrained]",
    ),
    "dino-r50": ShippedModel(
        "damex-dino-4scale_r50_1xb4-12e_finetune",
        47.8,
        "a GPU; COCO weights, downloaded",
    ),
    "dino-convnext-t": ShippedModel(
        "damex-dino-4scale_convnext-t_8xb2-12e_coco-voc",
        48.6,
        "a GPU; ImageNet weights, downloaded",
    ),
    "rtdetr-v2-s": _of_hub(20.2, "PekingU/rtdetr_v2_r18vd"),
    "d-fine-n": _of_hub(3.8, "ustc-community/dfine-nano-coco"),
    "d-fine-s": _of_hub(10.4, "ustc-community/dfine-small-coco"),
    "deimv2-n": _of_hub(3.6, "harshaljanjani/DEIMv2_HGNetv2_N_COCO_Transformers"),
}


def models_help() -> str:
    """Return a line for each model, for the help of ``--model``."""
    rows = (
        f"{k} ({m.parameters:g} M parameters; {m.needs})" for k, m in MODELS.items()
    )
    return f"Detector for --data (default: tiny): {', '.join(rows)}."


def named_folders(words: Sequence[str]) -> dict[str, str]:
    """Parse words as of ``--data``: ``NAME=FOLDER``, or a folder with its own name.

    ConfigError if a name is empty, has a ``/`` or is given twice, or if a folder is
    missing.
    """
    folders: dict[str, str] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals or Path(word).expanduser().exists():
            name, folder = folder_name(word), word
        if not name or "/" in name:
            raise ConfigError(
                f"{word} does not exist (seen from {Path.cwd()}), and {name!r} "
                "cannot be the NAME of NAME=FOLDER: it must not be empty or have a '/'."
            )
        if name in folders:
            raise ConfigError(
                f"two datasets are called {name!r}, {folders[name]} and "
                f"{folder}; name them, as in {name}2={folder}."
            )
        place = Path(folder).expanduser()
        if not place.is_dir():
            problem = "is a file" if place.is_file() else "does not exist"
            raise ConfigError(
                f"{folder} {problem} (seen from {Path.cwd()}); name the folder "
                "of a dataset."
            )
        folders[name] = folder
    return folders


def folder_name(folder: str | os.PathLike[str]) -> str:
    """Return the name of a folder; a link has its name, not that of its target."""
    path = Path(folder).expanduser().absolute()
    return (path.resolve() if path.name == ".." else path).name


def run_name(folders: Iterable[str]) -> str:
    """Name of the config and the work dir of a training on some datasets."""
    name = "-".join(folders)
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME - 9]}-{digest}"


def config_of_folders(
    folders: Mapping[str, str], model: str = "tiny", *, needs_model: bool = True
) -> Config:
    """Return the config of a detector of `MODELS` for folders by name, in any format.

    With `needs_model`, all of mmdet is imported, which builds the detector. ConfigError
    if the model is unknown, or there is no dataset.
    """
    from damex.config_files import PlainConfig, read_config

    check_known(model, MODELS, f"there is no model {model!r}")
    if not folders:
        raise ConfigError("there is no dataset; name the folder of one or more.")
    cfg = read_config(MODELS[model].config, needs_model=needs_model)
    if MODELS[model].name is not None:
        cfg.model.name = MODELS[model].name
    cfg.mixture = [
        dict(name=name, root=str(Path(root).expanduser()), weight=1.0)
        for name, root in folders.items()
    ]
    return PlainConfig(cfg._cfg_dict, cfg_text="\n", filename=f"{run_name(folders)}.py")
