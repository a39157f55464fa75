"""``damex prune`` and ``damex merge``: a detector with fewer datasets or experts.

A dropped dataset takes its classes and experts with it; merged dataset groups share the
mean of their experts.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mmengine.device import get_device
from torch import Tensor

from damex.config_files import KEYS, PlainConfig, mixture_datasets, mixtures_of
from damex.datasets.label_space import LabelFile, LabelSpace
from damex.engine.console import filter_console
from damex.engine.rows import RowNames, has_groups, row_keys
from damex.engine.summary import markdown
from damex.errors import ConfigError, DataError
from damex.inference.stored import DetectorCheckpoint, check_target, millions
from damex.inference.trust import check_parts
from damex.models.insertion import moe_blocks
from damex.workbench.export.specialist import clamp_max_per_img
from damex.workbench.growth.grow import (
    Changed,
    build_initialized,
    mixing_notes,
    remapped_state,
)

# Start and folder of the original training, and keys that run code outside registries.
OF_A_TRAINING = ("load_from", "load_optimizer", "resume", "train_only", "work_dir")
NOT_KEPT = (*OF_A_TRAINING, "launcher", "compile")
DOWN, UP = "down_EDL", "up_ELD"  # of LowRankExperts


def drop_datasets(stored: DetectorCheckpoint, drop: Sequence[str]) -> Changed:
    """Remove datasets, with the classes and experts that no other dataset has.

    ConfigError if a dataset is unknown or the last, or others need its experts.
    """
    for name in drop:
        stored.space.dataset_id(name)
    return _limited(stored, without(stored.space, drop))


def merge_groups(stored: DetectorCheckpoint, datasets: Sequence[str]) -> Changed:
    """Merge the groups of ``datasets`` into one with the mean of their experts.

    The mean covers all weights, router rows included. Low-rank maps are averaged as
    full maps and truncated to their rank by SVD; averaging the factors would mix them
    up. ConfigError if a dataset is unknown, or the groups are one or cannot be
    averaged.
    """
    old = stored.space
    groups = tuple(dict.fromkeys(old.groups[old.dataset_id(n)] for n in datasets))
    if len(groups) < 2:
        raise ConfigError(
            f"--datasets must name datasets of two groups or more, and "
            f"{', '.join(datasets)} is of {groups[0]!r} alone; the groups of "
            f"{stored.path} are {', '.join(old.group_names)}."
        )
    name = "+".join(groups)
    # The first group gets the averaged rows; the others are dropped.
    state, space = _averaged(stored, groups), _renamed(old, groups[:1], name)
    first = replace(stored, state=state, space=space)
    return _limited(first, _renamed(old, groups, name))


def _renamed(space: LabelSpace, groups: Collection[str], name: str) -> LabelSpace:
    """A label space in which some groups get another name."""
    renamed = tuple(name if own in groups else own for own in space.groups)
    return replace(space, groups=renamed)


def _averaged(stored: DetectorCheckpoint, groups: Sequence[str]) -> dict[str, Tensor]:
    """State dict in which the rows of the first group are the means over ``groups``."""
    owners = row_keys(stored.build(), stored.state, RowNames.of_space(stored.space))
    of_groups = {k: rows for k, rows in owners.items() if rows[0].kind == "groups"}
    if not of_groups:
        raise ConfigError(
            f"the detector in {stored.path} has no experts that belong to datasets, so "
            "that there are none to merge."
        )
    state = dict(stored.state)
    for key, rows in of_groups.items():
        places = [
            [row for row, owner in enumerate(rows) if owner.names == (group,)]
            for group in groups
        ]
        shared = sum(len(o.names) > 1 and {*o.names} & {*groups} != set() for o in rows)
        if shared or len({*map(len, places)}) > 1:
            counts = zip(groups, map(len, places), strict=True)
            own = ", ".join(f"{group} {count}" for group, count in counts)
            raise ConfigError(
                f"the experts of {' and '.join(groups)} in {stored.path} have no "
                f"counterparts in each other: per layer {own} of its own, and {shared} "
                "shared with other groups."
            )
        if key.endswith(UP):  # both factors are one map
            continue
        means = {key: torch.stack([state[key][rows] for rows in places])}
        if key.endswith(DOWN):
            other = key.removesuffix(DOWN) + UP
            factors = _mean_maps(state[key], state[other], places)
            means = dict(zip((key, other), factors, strict=True))
        else:  # counts of tokens are integers
            means[key] = means[key].double().mean(0).to(means[key])
        for name, mean in means.items():
            state[name] = state[name].clone()
            state[name][places[0]] = mean
    return state


def _mean_maps(
    down_NDL: Tensor, up_NLD: Tensor, places: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Factors of the groups' mean low-rank maps, truncated to the rank L by SVD.

    N experts of a group, D width.
    """
    rank = down_NDL.shape[-1]
    mean_NDD = torch.stack([down_NDL[rows] @ up_NLD[rows] for rows in places]).mean(0)
    left_NDD, values_ND, right_NDD = torch.linalg.svd(mean_NDD)
    roots_NL = values_ND[:, :rank].sqrt()
    left_NDL, right_NLD = left_NDD[:, :, :rank], right_NDD[:, :rank]
    return left_NDL * roots_NL[:, None], roots_NL[..., None] * right_NLD


def _limited(stored: DetectorCheckpoint, space: LabelSpace) -> Changed:
    """The detector reduced to a smaller label space."""
    old = stored.build()
    blocks = moe_blocks(old)
    if blocks and not any(map(has_groups, blocks)):
        raise ConfigError(
            f"the experts of the detector in {stored.path} belong to no dataset (moe "
            "has no DatasetRoutingLoss and no teacher_forcing), so that none can be "
            "dropped with one."
        )
    config = kept_config(stored, space)
    model = config["model"]
    clamp_max_per_img(model, old, space.num_classes)
    if blocks:
        _count_experts(model["moe"], blocks[0].moe, stored.space, space)
    detector = build_initialized(model)
    state = remapped_state(stored, detector, space)
    notes = (*mixing_notes(detector), *kept_notes(stored))
    moe = detector.resolved_moe()
    return Changed(PlainConfig(config), space, state, stored.space, moe, notes)


def kept_config(stored: DetectorCheckpoint, space: LabelSpace) -> dict[str, Any]:
    """The config to write: its allowed parts, or all of it with ``trust``."""
    config = config_without(stored.config, space)
    if not stored.trust:
        config = {key: value for key, value in config.items() if key in KEYS}
        check_parts(config, where=stored.path)
    imports = _imports(stored) if stored.trust else []
    config["custom_imports"] = dict(imports=["damex.registry", *imports])
    return config


def _imports(stored: DetectorCheckpoint) -> list[str]:
    """Modules of ``custom_imports`` other than damex's."""
    names = (stored.config.get("custom_imports") or {}).get("imports") or []
    names = [names] if isinstance(names, str) else names
    return [str(name) for name in names if name != "damex.registry"]


def kept_notes(stored: DetectorCheckpoint) -> Iterator[str]:
    """Warn about what the written config leaves out."""
    if not stored.trust and (left := _imports(stored)):
        yield (
            f"custom_imports of the checkpoint ({', '.join(map(repr, left))}) are not "
            "in the new config; to keep them, use --trust."
        )
    if stored.forgotten:
        yield (
            f"{', '.join(stored.forgotten)} named initial weights at a place that "
            "damex does not know, and is not in the new config; start trainings with "
            "load_from."
        )


def _count_experts(
    moe: dict[str, Any], layer: Any, old: LabelSpace, space: LabelSpace
) -> None:
    """Set the number of experts of the remaining groups in ``moe``, in place."""
    kept = [old.group_names.index(name) for name in space.group_names]
    count = int(layer.group_experts_GE[kept].any(0).sum())
    if moe.get("num_experts") is not None:
        moe["num_experts"] = count
    if (fine := moe.get("fine_grained")) is not None:
        fine["copies"] = fine["copies"] * count // layer.num_experts


def without(space: LabelSpace, drop: Collection[str]) -> LabelSpace:
    """Drop datasets and their exclusive classes; ConfigError if none would remain."""
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
    """Reduce a resolved config to the datasets of ``space``."""
    found = copy.deepcopy(dict(config))
    names = space.dataset_names
    if found.get("mixture") is not None:
        found["mixture"] = _entries(found["mixture"], space)
    for dataset in mixtures_of(found):
        dataset["datasets"] = _entries(dataset.get("datasets"), space)
        dataset["label_space"] = space.to_metainfo()
    if isinstance(found.get("label_space"), Mapping):
        rules = LabelFile.from_content(found["label_space"])
        found["label_space"] = rules.only(*names).to_content()
    for key in (*NOT_KEPT, "custom_imports"):
        found.pop(key, None)
    model = found["model"]
    model["bbox_head"]["num_classes"] = space.num_classes
    if model.get("num_groups") is not None:
        model["num_groups"] = len(space.group_names)
    if model.get("label_coverage") is not None:
        model["label_coverage"] = space.coverage()
    return found


def _entries(entries: Any, space: LabelSpace) -> list[Any]:
    """The entries of the remaining datasets, with their current groups."""
    groups = dict(zip(space.dataset_names, space.groups, strict=True))
    kept = []
    for entry in entries or ():
        if (group := groups.get(entry["name"])) is not None:
            is_named = (entry.get("group") or entry["name"]) == group
            kept.append(entry if is_named else dict(entry, group=group))
    return kept


def prune(checkpoint: str, *, drop: Sequence[str], out: str, trust: bool) -> None:
    """Write a checkpoint and config without some datasets."""
    filter_console()
    check_target(Path(out))
    stored = DetectorCheckpoint.read(checkpoint, trust=trust)
    pruned = drop_datasets(stored, drop)
    gone = [name for name in stored.space.classes if name not in pruned.space.classes]
    _write(
        pruned,
        stored,
        Path(out),
        f"datasets: {', '.join(pruned.space.dataset_names)}; classes: "
        f"{pruned.space.num_classes}; gone: {', '.join(gone) or 'none'}",
    )


def merge(
    checkpoint: str, *, datasets: Sequence[str], out: str, no_test: bool, trust: bool
) -> None:
    """Write a checkpoint in which datasets share experts; print the change in AP."""
    filter_console()
    check_target(Path(out))
    stored = DetectorCheckpoint.read(checkpoint, trust=trust)
    merged = merge_groups(stored, datasets)
    groups = ", ".join(merged.space.group_names)
    before = None if no_test else _scores(stored, "before")
    _write(merged, stored, Path(out), f"groups of datasets with experts: {groups}")
    if before is not None:
        after = _scores(DetectorCheckpoint.read(out, trust=trust), "after")
        print(_cost(before, after))


def _write(pruned: Changed, stored: DetectorCheckpoint, out: Path, about: str) -> None:
    """Write a checkpoint and its config, and print a summary."""
    pruned.write(out)
    print(
        f"written: {out} and {out.with_suffix('.py')}\n{about}\n"
        f"{millions(pruned.state)} million parameters of {millions(stored.state)}"
        + "".join(f"\nnote: {note}" for note in pruned.notes),
        flush=True,
    )


def _scores(stored: DetectorCheckpoint, label: str) -> dict[str, float | None]:
    """Test AP per dataset, mean and pooled; a DataError tells of ``--no-test``."""
    loader = stored.checked("test_dataloader")
    mixtures = mixture_datasets((loader or {}).get("dataset"))
    if not mixtures or not mixtures[0].get("datasets"):
        raise ConfigError(
            f"the config in {stored.path} has no test_dataloader with a mixture to "
            "evaluate on; use --no-test."
        )
    try:
        summary = stored.evaluate(stored.build(get_device()), loader or {}, label=label)
    except DataError as error:
        raise DataError(f"{error} To merge without AP: --no-test.") from error
    rows = {name: row["ap"] for name, row in summary["datasets"].items()}
    return rows | {"mean": summary["mean_ap"], "pooled": summary["pooled_ap"]}


def _cost(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Table of AP before and after."""
    rows = []
    for name, old in before.items():
        values = [old, after[name]]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        change = "-" if None in values else f"{values[1] - values[0]:+.3f}"
        rows.append((name, *cells, change))
    return markdown(("AP", "before", "after", "change"), rows)
