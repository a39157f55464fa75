"""Rows: the meaning of the first axis of a detector's tensors, by name.

A row of a classifier belongs to a class; a row of a router or a bank of experts to an
expert and so to dataset groups. Names match rows that detectors number differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN, MoEPatchConv
from damex.models.told_dataset import selects_by_first_class

CLASSIFIERS = ("fc_cls", "cls_branches", "aux_cls_branches")
LABELS = "dn_query_generator.label_embedding."
GROUP_EXPERTS = "group_experts_GE"


@dataclass(frozen=True)
class Owner:
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


def row_owners(
    detector: Any, state: Mapping[str, Tensor], names: RowNames
) -> dict[str, tuple[Owner, ...]]:
    """Return the owners of each tensor's rows, for classes, experts and dataset groups.

    Tensors whose size does not match the names are omitted. The detector is of the same
    kind as the state dict's, but may have another size.
    """
    found = [
        *_classes_and_owners(detector, state, names.classes),
        *_groups_and_owners(detector, state, names.groups),
    ]
    return {
        key: tuple(owners)
        for key, owners in found
        if state[key].dim() > 0 and len(state[key]) == len(owners)
    }


def _classes_and_owners(
    detector: Any, state: Mapping[str, Tensor], classes: Sequence[str] | None
) -> Iterator[tuple[str, list[Owner]]]:
    """Yield tensors with a row per class."""
    starts = tuple(f"bbox_head.{name}." for name in CLASSIFIERS)
    keys = [key for key in state if key.startswith((*starts, LABELS))]
    for key in keys if classes else ():
        yield key, _class_owners(detector, key, state, classes or ())


def _groups_and_owners(
    detector: Any, state: Mapping[str, Tensor], groups: Sequence[str] | None
) -> Iterator[tuple[str, list[Owner]]]:
    """Yield tensors with a row per expert or dataset group."""
    one_each = [Owner("groups", (name,)) for name in groups or ()]
    for name, module in detector.named_modules():
        prefix = f"{name}.moe."
        mask_GE = state.get(prefix + GROUP_EXPERTS)
        if not has_groups(module) or mask_GE is None or len(mask_GE) != len(one_each):
            continue
        experts = _expert_owners(mask_GE, groups or ())
        for key in (k for k in state if k.startswith(prefix)):
            part, _, own = key.removeprefix(prefix).partition(".")
            declared = _declaration(getattr(module.moe, part, None), own)
            if declared is None:
                continue
            holder, tensor = declared
            if tensor in holder.expert_rows:
                yield key, experts
            elif tensor in getattr(holder, "group_rows", ()):
                yield key, one_each
    for key in (k for k in state if k.startswith("awareness.")):
        yield key, one_each


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
                        "experts of datasets cannot be told apart; set "
                        f"expert_rows = ({name!r},) in the class, or () if none has."
                    )


def has_groups(module: Any) -> bool:
    """Whether a module is a MoE block in which datasets are taught their experts."""
    if not isinstance(module, (MoEFFN, MoEPatchConv)):
        return False
    is_taught = any(loss.needs_groups for loss in module.moe.losses)
    return is_taught or module.moe.group_choice.teacher_forcing


def _class_owners(
    detector: Any, key: str, state: Mapping[str, Tensor], classes: Sequence[str]
) -> list[Owner]:
    """Return owners of class rows; with a softmax, the background comes last."""
    found = [
        # A duplicated name is ambiguous, so it matches no other row.
        Owner("class", (name,), row + 1 if classes.count(name) > 1 else 0)
        for row, name in enumerate(classes)
    ]
    if not key.startswith(LABELS) and len(state[key]) == len(classes) + 1:
        found.append(Owner("background"))
    if selects_by_first_class(detector) and key.startswith(
        f"bbox_head.cls_branches.{len(detector.bbox_head.cls_branches) - 1}."
    ):
        found[0] = Owner("object")
    return found


def _expert_owners(mask_GE: Tensor, groups: Sequence[str]) -> list[Owner]:
    """Return the groups that each expert serves, counted."""
    counts: dict[tuple[str, ...], int] = {}
    owners = []
    for served_G in torch.as_tensor(mask_GE).T.tolist():
        names = tuple(sorted(g for g, own in zip(groups, served_G, strict=True) if own))
        owners.append(Owner("groups", names, counts.get(names, 0)))
        counts[names] = counts.get(names, 0) + 1
    return owners
