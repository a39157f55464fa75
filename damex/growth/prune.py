"""Prune: a detector without some of its datasets."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmengine.config import Config
from torch import Tensor

from damex.datasets.label_file import LabelFile
from damex.datasets.label_space import LabelSpace
from damex.engine.checkpoint import check_tensors
from damex.engine.config_files import LOADERS, mixture_datasets
from damex.engine.row_transfer import move_rows, names_of_space
from damex.errors import ConfigError
from damex.growth.grow import check_experts, fresh_detector, mixing_notes
from damex.inference.specialist import limit_answers
from damex.inference.stored import StoredDetector
from damex.models.insertion import moe_blocks
from damex.models.rows import has_groups


@dataclass(frozen=True)
class Pruned:
    """A detector of fewer datasets.

    Attributes:
        config: That of the checkpoint without them.
        space: The label space that is left.
        state: Weights by their names.
        moe: Its resolved ``moe`` tree.
        notes: What of the other datasets changes, each in a sentence.
    """

    config: Config
    space: LabelSpace
    state: Mapping[str, Tensor]
    moe: Mapping[str, Any]
    notes: tuple[str, ...]


def drop_datasets(stored: StoredDetector, drop: Sequence[str]) -> Pruned:
    """Take datasets away, with the classes and experts that no other dataset has.

    Args:
        stored: The checkpoint.
        drop: Names of datasets.

    Raises:
        ConfigError: If there is no such dataset, none would be left, or the others
            would not keep their experts.
    """
    for name in drop:
        stored.dataset_id(name)
    space = without(stored.space, drop)
    old = stored.build()
    blocks = moe_blocks(old)
    if blocks and not any(map(has_groups, blocks)):
        raise ConfigError(
            f"the experts of the detector in {stored.path} belong to no dataset (moe "
            "has no DatasetRoutingLoss and no teacher_forcing), so that none can be "
            "dropped with one."
        )
    config = config_without(stored.config, space)
    model = config["model"]
    limit_answers(model, old, space.num_classes)
    if blocks:
        _count_experts(model["moe"], blocks[0].moe, stored.space, space)
    detector = fresh_detector(model)
    check_experts(stored, detector, space)
    state = dict(stored.state)
    names = names_of_space(stored.space), names_of_space(space)
    move_rows(state, detector, stored=names[0], wanted=names[1])
    check_tensors(state, detector, path=stored.path)
    notes = tuple(mixing_notes(detector))
    return Pruned(Config(config), space, state, detector.resolved_moe(), notes)


def _count_experts(
    moe: dict[str, Any], layer: Any, old: LabelSpace, space: LabelSpace
) -> None:
    """Write the number of experts that serve the groups that are left into a config.

    Args:
        moe: Changed in place, where it names a number.
        layer: With the experts of all groups.
        old: The label space of the layer.
        space: The label space that is left.
    """
    kept = [old.group_names.index(name) for name in space.group_names]
    count = int(layer.group_experts_GE[kept].any(0).sum())
    if moe.get("num_experts") is not None:
        moe["num_experts"] = count
    fine = moe.get("fine_grained")
    if fine is not None:
        fine["copies"] = fine["copies"] * count // layer.num_experts


def without(space: LabelSpace, drop: Collection[str]) -> LabelSpace:
    """A label space without some datasets and the classes that only they have.

    Raises:
        ConfigError: If no dataset would be left.
    """
    kept = [i for i, name in enumerate(space.dataset_names) if name not in drop]
    if not kept:
        raise ConfigError(
            f"--drop names all datasets ({', '.join(space.dataset_names)}), and one "
            "has to stay."
        )
    mappings = tuple(space.dataset_classes[i] for i in kept)
    used = {name for mapping in mappings for name in mapping.values()}
    return LabelSpace(
        classes=tuple(name for name in space.classes if name in used),
        dataset_names=tuple(space.dataset_names[i] for i in kept),
        dataset_classes=mappings,
        groups=tuple(space.groups[i] for i in kept),
    )


def config_without(config: Mapping[str, Any], space: LabelSpace) -> dict[str, Any]:
    """A resolved config for some of its datasets.

    Args:
        config: As it lies in a checkpoint.
        space: The label space that is left.
    """
    found = copy.deepcopy(dict(config))
    names = space.dataset_names
    if found.get("mixture") is not None:
        found["mixture"] = _entries(found["mixture"], names)
    for loader in LOADERS:
        for dataset in mixture_datasets((found.get(loader) or {}).get("dataset")):
            dataset["datasets"] = _entries(dataset.get("datasets"), names)
            dataset["label_space"] = space.to_metainfo()
    if isinstance(found.get("label_space"), Mapping):
        rules = LabelFile.from_content(found["label_space"])
        found["label_space"] = rules.only(*names).to_content()
    # What a training took its start from is no start for this detector.
    for key in ("load_from", "resume", "train_only"):
        found.pop(key, None)
    model = found["model"]
    model["bbox_head"]["num_classes"] = space.num_classes
    if model.get("num_groups") is not None:
        model["num_groups"] = len(space.group_names)
    if model.get("label_coverage") is not None:
        model["label_coverage"] = space.coverage()
    return found


def _entries(entries: Any, names: Sequence[str]) -> list[Any]:
    return [entry for entry in entries or () if entry["name"] in names]
