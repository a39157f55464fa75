"""Config values that follow from the mixture."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from mmengine.config import Config, ConfigDict

from damex.datasets.label_space import LabelFile, LabelSpace, read_label_space
from damex.datasets.spec import parse_mixture
from damex.engine.config_files import (
    LOADERS,
    PlainConfig,
    mixture_datasets,
    moe_of_file,
)
from damex.errors import ConfigError
from damex.models.dataset_awareness import DatasetAwarenessConfig

# Detector options that depend on which dataset annotates which class.
DATASET_OPTIONS = tuple(vars(DatasetAwarenessConfig()))


def resolve_config(cfg: Config | ConfigDict) -> PlainConfig:
    """Fill in datasets, label space, ``num_classes``, ``num_groups`` and ``moe``.

    ``label_coverage`` is filled in if an option of the detector needs it. The top-level
    ``moe`` becomes ``model.moe``; it may name a file of ``configs/_base_/moe``, or the
    path of another file that sets ``moe``.

    Every ``MixtureDataset`` without ``datasets`` gets the top-level ``mixture`` list
    and the label space of the whole mixture, so that labels mean the same in training
    and evaluation. If the config already holds a label space, it is kept and no
    annotation file is read: the config of a work dir also works without the training
    files. Without ``mixture`` only ``moe`` is resolved.

    Args:
        cfg: A full config; not changed.

    Returns:
        A resolved copy.

    Raises:
        ConfigError: If the mixture is invalid, or ``num_classes`` contradicts it.
        DataError: If an annotation file is missing or is not in COCO format.
    """
    cfg = PlainConfig.of(copy.deepcopy(cfg))
    _set_moe(cfg)
    if cfg.get("mixture") is None:
        return cfg
    specs = parse_mixture(cfg["mixture"])
    mode = read_label_space(cfg.get("label_space") or "union")
    if isinstance(mode, LabelFile):
        # A written config must not depend on the file.
        cfg["label_space"] = mode.to_content()
    space = label_space_of(cfg)
    if space is None:
        space = LabelSpace.from_specs(specs, mode=mode)
    else:
        space.check(specs, mode=mode)
    for loader in LOADERS:
        for dataset in mixture_datasets((cfg.get(loader) or {}).get("dataset")):
            dataset.setdefault("datasets", cfg["mixture"])
            dataset["label_space"] = space.to_metainfo()
    _set_num_classes(cfg["model"], space)
    _set_batch_size(cfg.get("train_dataloader") or {})
    if cfg["model"].get("moe") is not None:
        cfg["model"]["num_groups"] = len(space.group_names)
    if any(cfg["model"].get(name) not in (None, False) for name in DATASET_OPTIONS):
        cfg["model"]["label_coverage"] = space.coverage()
    return cfg


def label_space_of(cfg: Config | ConfigDict) -> LabelSpace | None:
    """Return the label space of a resolved config; None without a mixture."""
    for loader in LOADERS:
        for dataset in mixture_datasets((cfg.get(loader) or {}).get("dataset")):
            if isinstance(dataset.get("label_space"), Mapping):
                return LabelSpace.from_metainfo(dataset["label_space"])
    return None


def _set_moe(cfg: Config | ConfigDict) -> None:
    if "moe" not in cfg:
        return
    if "moe" in cfg["model"]:
        raise ConfigError(
            "both moe and model.moe are set; keep one of them (moe=None at the top "
            "level makes the detector dense)."
        )
    moe = cfg.pop("moe")  # kept in one place, so that a written config reads back
    cfg["model"]["moe"] = moe_of_file(moe) if isinstance(moe, str) else moe


def _set_batch_size(loader: dict) -> None:
    """Pass the batch size to a sampler of homogeneous batches."""
    sampler = loader.get("sampler") or {}
    if not sampler.get("homogeneous_batches"):
        return
    if loader.get("batch_sampler"):
        raise ConfigError(
            "train_dataloader.sampler.homogeneous_batches=True, but the batch_sampler "
            f"{loader['batch_sampler']['type']} makes other batches; set "
            "train_dataloader.batch_sampler=None, or leave homogeneous_batches out."
        )
    sampler["batch_size"] = loader["batch_size"]


def _set_num_classes(model: dict, space: LabelSpace) -> None:
    """Set the number of classes of the head; a contradiction is an error."""
    head = model.get("bbox_head")
    if not isinstance(head, dict):
        return
    typed = head.get("num_classes")
    if typed is not None and typed != space.num_classes:
        raise ConfigError(
            f"model.bbox_head.num_classes is {typed}, but the mixture of "
            f"{', '.join(space.dataset_names)} has {space.num_classes} classes; leave "
            "num_classes out (or None), it follows from the mixture."
        )
    head["num_classes"] = space.num_classes
