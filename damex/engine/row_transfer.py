"""Rows of a checkpoint's classes and datasets, assigned to those of the same name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from damex.datasets.label_space import LabelSpace
from damex.models.rows import (
    GROUP_EXPERTS,
    Owner,
    RowNames,
    check_declared,
    row_owners,
)


@dataclass(frozen=True)
class RowTransfer:
    """Rows taken over by name.

    Attributes:
        moved: Names of the tensors whose rows moved or are new.
        notes: Sentences about it.
    """

    moved: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def take_over_rows(
    state: dict[str, Any], meta: Mapping[str, Any], detector: Any, space: Any
) -> RowTransfer:
    """Reorder the rows of `state`, in place, by a mixture's class and dataset names."""
    if detector is None or space is None:
        return RowTransfer()
    stored, wanted = names_of_meta(meta), names_of_space(space)
    fillings = tuple(_filling_notes(state, detector, stored, wanted))
    moved = move_rows(state, detector, stored=stored, wanted=wanted)
    notes = (*transfer_notes(stored, wanted, moved), *fillings)
    return RowTransfer(frozenset(moved), notes)


def _filling_notes(
    state: Mapping[str, Any], detector: Any, stored: RowNames, wanted: RowNames
) -> Iterator[str]:
    """Describe which experts become which if a group changes size."""
    sources = row_owners(detector, state, stored)
    targets = row_owners(detector, detector.state_dict(), wanted)
    notes = {}
    for key in (k for k in targets if ".moe.experts." in k and k in sources):
        old, new = sources[key], targets[key]
        shared = {o.names for o in old} & {o.names for o in new}
        counts = [Counter(o.names for o in rows) for rows in (old, new)]
        if any(counts[0][names] != counts[1][names] for names in shared):
            places = {owner: row for row, owner in enumerate(old)}
            parts = [
                f"{row} ({'+'.join(owner.names)}) "
                + (f"from {places[owner]}" if owner in places else "new")
                for row, owner in enumerate(new)
            ]
            what = f"{len(old)} experts per layer of the checkpoint become {len(new)}"
            notes[what] = parts
    for what, parts in notes.items():
        yield f"{what}: {', '.join(parts)}; new ones start as in a new training."


def names_of_space(space: LabelSpace) -> RowNames:
    """Return the class and group names of a label space."""
    return RowNames(space.classes, space.group_names)


def names_of_meta(meta: Mapping[str, Any]) -> RowNames:
    """Return the names in ``checkpoint['meta']`` of damex or mmdet.

    mmdet 3 stores ``classes`` in ``dataset_meta`` (``CLASSES`` in its first versions),
    mmdet 2 stores ``CLASSES`` at the top level.
    """
    stored = meta.get("dataset_meta") or {}
    classes = stored.get("classes") or stored.get("CLASSES") or meta.get("CLASSES")
    if isinstance(classes, str):  # mmdet's form for a single class
        classes = (classes,)
    groups = None
    if "datasets" in stored:
        groups = LabelSpace.from_metainfo(stored).group_names
    return RowNames(tuple(classes) if classes else None, groups)


def move_rows(
    state: dict[str, Any], detector: Any, *, stored: RowNames, wanted: RowNames
) -> set[str]:
    """Give each class and expert of a detector the rows of its name, in `state`.

    Missing names keep the detector's initial rows. Tensors are unchanged if the names
    are unknown, or the same in the same order.

    Returns:
        Names of the changed tensors.

    Raises:
        ConfigError: If experts would move and do not declare their rows.
    """
    if stored.groups and wanted.groups and stored.groups != wanted.groups:
        check_declared(detector)
    own = detector.state_dict()
    sources = row_owners(detector, state, stored)
    targets = row_owners(detector, own, wanted)
    moved = set()
    for name in sources.keys() & targets.keys():
        same_rows = sources[name] == targets[name]
        if same_rows or own[name].shape[1:] != state[name].shape[1:]:
            continue
        state[name] = _gathered(own[name], targets[name], state[name], sources[name])
        moved.add(name)
        # The config decides which experts serve which group.
        groups = f"{name.rpartition('.moe.')[0]}.moe.{GROUP_EXPERTS}"
        if groups in state and groups in own:
            state[groups] = own[groups].clone()
    return moved


def _gathered(
    own: Tensor, targets: tuple[Owner, ...], given: Tensor, sources: tuple[Owner, ...]
) -> Tensor:
    """Copy a tensor, with the rows of the same owners taken from another."""
    places = {owner: row for row, owner in enumerate(sources)}
    rows = [(i, places[owner]) for i, owner in enumerate(targets) if owner in places]
    result = own.detach().clone()
    if rows:
        new, old = (torch.tensor(column) for column in zip(*rows, strict=True))
        result[new.to(result.device)] = given[old.to(given.device)].to(result)
    return result


def transfer_notes(
    stored: RowNames, wanted: RowNames, moved: set[str]
) -> Iterator[str]:
    """Yield a sentence each about classes and datasets taken over by name."""
    of_classes = {key for key in moved if ".moe." not in key and "awareness" not in key}
    if of_classes and stored.classes != wanted.classes:
        yield _note("classes", stored.classes or (), wanted.classes or ())
    if moved - of_classes and stored.groups != wanted.groups:
        yield _note("experts of datasets", stored.groups or (), wanted.groups or ())


def _note(what: str, stored: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    taken = [name for name in wanted if name in stored]
    new = [name for name in wanted if name not in stored]
    unused = sum(name not in wanted for name in stored)
    parts = [f"taken over by name: {', '.join(taken) or 'none'}"]
    parts += [f"new, as at the start of a training: {', '.join(new)}"] if new else []
    parts += [f"not used of the checkpoint: {unused}"] if unused else []
    return f"{what}: {'; '.join(parts)}."
