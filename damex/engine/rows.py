"""Rows: the meaning of the first axis of a detector's tensors, by name.

A row of a classifier belongs to a class; a row of a router or a bank of experts to an
expert and so to dataset groups. Row keys match rows that detectors number differently,
and the rows of a checkpoint are remapped to those of the same key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from damex.datasets.label_space import LabelSpace
from damex.errors import ConfigError
from damex.models.blocks import MoEBlock
from damex.models.queries import selects_by_first_class

LABELS = "dn_query_generator.label_embedding."
HEADS = ("fc_cls", "cls_branches", "aux_cls_branches")
OF_CLASSES = (*(f"bbox_head.{name}." for name in HEADS), LABELS)
GROUP_EXPERTS = "group_experts_GE"


@dataclass(frozen=True)
class RowKey:
    """What a row belongs to.

    Attributes:
        kind: 'class', 'background', 'object' (the single class of a first stage that
            separates objects from background), or 'groups'.
        names: The class, or all dataset groups that the row serves.
        number: Counts rows of the same groups.
    """

    kind: str
    names: tuple[str, ...] = ()
    number: int = 0


@dataclass(frozen=True)
class RowNames:
    """Class and dataset group names of a detector, in order; None if unknown."""

    classes: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None

    @classmethod
    def of_space(cls, space: LabelSpace) -> RowNames:
        """Return the names of a label space."""
        return cls(space.classes, space.group_names)

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any]) -> RowNames:
        """Return the names in ``checkpoint['meta']`` of damex or mmdet.

        mmdet 3 stores ``classes`` in ``dataset_meta`` (``CLASSES`` in its first
        versions), mmdet 2 stores ``CLASSES`` at the top level.
        """
        stored = meta.get("dataset_meta") or {}
        classes = stored.get("classes") or stored.get("CLASSES") or meta.get("CLASSES")
        if isinstance(classes, str):  # mmdet's form for a single class
            classes = (classes,)
        groups = None
        if "datasets" in stored:
            groups = LabelSpace.from_metainfo(stored).group_names
        return cls(tuple(classes) if classes else None, groups)


def row_keys(
    detector: Any, state: Mapping[str, Tensor], names: RowNames
) -> dict[str, tuple[RowKey, ...]]:
    """Return the keys of each tensor's rows, for classes, experts and dataset groups.

    Tensors whose size does not match the names are omitted. The detector is of the same
    kind as the state dict's, but may have another size.
    """
    found: dict[str, list[RowKey]] = {}
    starts = getattr(detector, "class_rows", OF_CLASSES)
    for name in state if names.classes else ():
        if name.startswith(starts):
            found[name] = _class_keys(detector, name, state, names.classes or ())
    one_each = [RowKey("groups", (name,)) for name in names.groups or ()]
    for path, block in detector.named_modules():
        prefix = f"{path}.moe."
        mask_GE = state.get(prefix + GROUP_EXPERTS)
        if not has_groups(block) or mask_GE is None or len(mask_GE) != len(one_each):
            continue
        experts = _expert_keys(mask_GE, names.groups or ())
        for name in (name for name in state if name.startswith(prefix)):
            part, _, own = name.removeprefix(prefix).partition(".")
            declared = _declaration(getattr(block.moe, part, None), own)
            if declared is None:
                continue
            holder, tensor = declared
            if tensor in holder.expert_rows:
                found[name] = experts
            elif tensor in getattr(holder, "group_rows", ()):
                found[name] = one_each
    found |= {name: one_each for name in state if name.startswith("awareness.")}
    return {
        name: tuple(keys)
        for name, keys in found.items()
        if state[name].dim() > 0 and len(state[name]) == len(keys)
    }


def _class_keys(
    detector: Any, name: str, state: Mapping[str, Tensor], classes: Sequence[str]
) -> list[RowKey]:
    """Return the keys of class rows; with a softmax, the background comes last."""
    found = [
        # A duplicated class is ambiguous, so it matches no other row.
        RowKey("class", (one,), row + 1 if classes.count(one) > 1 else 0)
        for row, one in enumerate(classes)
    ]
    if not name.startswith(LABELS) and len(state[name]) == len(classes) + 1:
        found.append(RowKey("background"))
    if selects_by_first_class(detector):
        first, *_, last = branches = detector.bbox_head.cls_branches
        own = f"bbox_head.cls_branches.{len(branches) - 1}."
        if first is not last and name.startswith(own):  # else its rows are classes
            found[0] = RowKey("object")
    return found


def _expert_keys(mask_GE: Tensor, groups: Sequence[str]) -> list[RowKey]:
    """Return the groups that each expert serves, counted."""
    counts: Counter[tuple[str, ...]] = Counter()
    found = []
    for served_G in torch.as_tensor(mask_GE).T.tolist():
        names = tuple(sorted(g for g, own in zip(groups, served_G, strict=True) if own))
        found.append(RowKey("groups", names, counts[names]))
        counts[names] += 1
    return found


def _declaration(part: Any, name: str) -> tuple[Any, str] | None:
    """Return the module that declares a tensor's rows, and the tensor's name there."""
    while not hasattr(part, "expert_rows"):
        child, dot, name = name.partition(".")
        if not dot or not hasattr(part, child):
            return None
        part = getattr(part, child)
    return part, name


def check_declared(detector: Any) -> None:
    """Reject experts, routers and gates of dataset groups with undeclared rows.

    Raises:
        ConfigError: If a tensor's rows are not declared.
    """
    for block in filter(has_groups, detector.modules()):
        for field in ("experts", "router", "gate"):
            part = getattr(block.moe, field)
            for name, tensor in part.state_dict().items():
                if tensor.dim() > 0 and _declaration(part, name) is None:
                    raise ConfigError(
                        f"moe.{field} is a {type(part).__name__}, which does not "
                        f"declare whether {name!r} has a row for each expert, so that "
                        "experts of datasets cannot be distinguished; set "
                        f"expert_rows = ({name!r},) in the class, or () if none has."
                    )


def has_groups(module: Any) -> bool:
    """Whether a module is a MoE block in which datasets are taught their experts."""
    if not isinstance(module, MoEBlock):
        return False
    is_taught = any(loss.needs_groups for loss in module.moe.losses)
    return is_taught or module.moe.group_choice.teacher_forcing


def remap_checkpoint(
    state: dict[str, Any], meta: Mapping[str, Any], detector: Any, space: Any
) -> tuple[set[str], list[str]]:
    """Remap the rows of ``state``, in place, to a mixture's classes and datasets.

    Returns:
        Names of the tensors whose rows moved or are new, and sentences about it.
    """
    if detector is None or space is None:
        return set(), []
    stored, wanted = RowNames.of_meta(meta), RowNames.of_space(space)
    resized = list(_resizing_notes(state, detector, stored, wanted))
    moved = remap_rows(state, detector, stored=stored, wanted=wanted)
    return moved, [*remap_notes(stored, wanted, moved), *resized]


def remap_rows(
    state: dict[str, Any], detector: Any, *, stored: RowNames, wanted: RowNames
) -> set[str]:
    """Give each class and expert of a detector the row of its key, in ``state``.

    Missing keys keep the detector's initial rows. Tensors are unchanged if the names
    are unknown, or the same in the same order.

    Returns:
        Names of the changed tensors.

    Raises:
        ConfigError: If experts would move and do not declare their rows.
    """
    if stored.groups and wanted.groups and stored.groups != wanted.groups:
        check_declared(detector)
    own = detector.state_dict()
    sources = row_keys(detector, state, stored)
    targets = row_keys(detector, own, wanted)
    moved = set()
    for name in sources.keys() & targets.keys():
        same_rows = sources[name] == targets[name]
        if same_rows or own[name].shape[1:] != state[name].shape[1:]:
            continue
        given, result = state[name], own[name].detach().clone()
        places = {key: row for row, key in enumerate(sources[name])}
        for row, key in enumerate(targets[name]):
            if key in places:
                result[row] = given[places[key]]
        state[name] = result
        moved.add(name)
        # The config decides which experts serve which group.
        groups = f"{name.rpartition('.moe.')[0]}.moe.{GROUP_EXPERTS}"
        if groups in state and groups in own:
            state[groups] = own[groups].clone()
    return moved


def _resizing_notes(
    state: Mapping[str, Any], detector: Any, stored: RowNames, wanted: RowNames
) -> Iterator[str]:
    """Describe which experts become which if a group changes size."""
    sources = row_keys(detector, state, stored)
    targets = row_keys(detector, detector.state_dict(), wanted)
    notes = {}
    for name in (k for k in targets if ".moe.experts." in k and k in sources):
        old, new = sources[name], targets[name]
        before, after = (Counter(key.names for key in rows) for rows in (old, new))
        if any(before[names] != after[names] for names in before.keys() & after.keys()):
            places = {key: row for row, key in enumerate(old)}
            what = f"{len(old)} experts per layer of the checkpoint become {len(new)}"
            notes[what] = [
                f"{row} ({'+'.join(key.names)}) "
                + (f"from {places[key]}" if key in places else "new")
                for row, key in enumerate(new)
            ]
    for what, parts in notes.items():
        yield f"{what}: {', '.join(parts)}; new ones are newly initialized."


def remap_notes(stored: RowNames, wanted: RowNames, moved: set[str]) -> Iterator[str]:
    """Yield a sentence each about remapped classes and datasets."""
    of_classes = {key for key in moved if ".moe." not in key and "awareness" not in key}
    for what, is_moved, old, now in (
        ("classes", of_classes, stored.classes, wanted.classes),
        ("experts of datasets", moved - of_classes, stored.groups, wanted.groups),
    ):
        if not is_moved or old == now:
            continue
        old, now = old or (), now or ()
        taken = [name for name in now if name in old]
        new = [name for name in now if name not in old]
        unused = sum(name not in now for name in old)
        parts = [f"loaded by name: {', '.join(taken) or 'none'}"]
        if new:
            parts.append(f"newly initialized: {', '.join(new)}")
        if unused:
            parts.append(f"only in the checkpoint: {unused}")
        yield f"{what}: {'; '.join(parts)}."
