"""``train_only=[...]``: train only the parts that belong to some datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from damex.datasets.label_space import LabelSpace
from damex.engine.rows import RowKey, RowNames, check_declared, has_groups, row_keys
from damex.engine.schedule import bare_model
from damex.errors import ConfigError, did_you_mean
from damex.models.detectors import RoutedDetector
from damex.models.insertion import moe_blocks
from damex.moe import TopKGate


def freeze_all_but(
    model: Any, space: LabelSpace | None, datasets: Any
) -> dict[str, Tensor]:
    """Freeze all of a detector that does not belong to the named datasets alone.

    Experts, and their router rows, are trained if all datasets of their groups are
    named; classes are trained if no other dataset has them. Parameters without any
    trained row get ``requires_grad=False``.

    Returns:
        A bool per row, True if the row is frozen, of each partly trained parameter and
        of every buffer (all True if nothing in it is trained, as gates may write to
        their buffers).

    Raises:
        ConfigError: If a name is wrong, nothing would be trained, or the detector
            itself schedules which parts are frozen.
    """
    space = _check(model, space, datasets)
    datasets = [
        str(name) for name in datasets
    ]  # a command line parses 2019 as a number
    check_declared(model)
    owners = row_keys(model, model.state_dict(), RowNames.of_space(space))
    trained = _trained_owners(space, datasets)
    kept = {
        key: torch.tensor([owner not in trained for owner in rows])
        for key, rows in owners.items()
        if any(owner in trained for owner in rows)
    }
    if not kept:
        raise ConfigError(
            f"train_only={list(datasets)!r}: these datasets have no class and no "
            "experts of their own, so that nothing would be trained; name all datasets "
            "of a group, or leave train_only out."
        )
    for key in kept.keys() & _free_routers(model):
        kept[key].fill_(False)
    for name, buffer in model.named_buffers():
        kept.setdefault(name, torch.ones(buffer.shape[:1], dtype=torch.bool))
    for name, parameter in model.named_parameters():
        if name not in kept:
            parameter.requires_grad_(False)
    return kept


def _free_routers(model: Any) -> set[str]:
    """Router parameters whose rows may all learn: those that only choose the expert.

    If the single expert of a token has weight 1, its router cannot change a detection
    of an unnamed dataset. Frozen rows could not learn to tell old images from new ones.
    """
    return {
        f"{name}.moe.router.{key}"
        for name, block in model.named_modules()
        if has_groups(block) and _has_weight_one(block.moe.gate)
        for key, _ in block.moe.router.named_parameters()
    }


def _has_weight_one(gate: Any) -> bool:
    return isinstance(gate, TopKGate) and gate.k == 1 and gate.renormalize


def _check(model: Any, space: LabelSpace | None, datasets: Any) -> LabelSpace:
    if isinstance(datasets, str) or not isinstance(datasets, Sequence) or not datasets:
        raise ConfigError(
            "train_only must be a list of names of datasets, such as "
            f"train_only=['{datasets if isinstance(datasets, str) else 'cells'}'], got "
            f"{datasets!r}."
        )
    if space is None or not isinstance(model, RoutedDetector):
        raise ConfigError(
            f"train_only={list(datasets)!r} needs a mixture and a detector of damex "
            "(model.type='MoEDINO'); leave it out."
        )
    for name in map(str, datasets):
        if name not in space.dataset_names:
            raise ConfigError(
                f"train_only: the mixture has no dataset {name!r}; "
                f"{did_you_mean(name, space.dataset_names)}"
            )
    if model.trains_in_stages or any(b.moe.shards for b in moe_blocks(model)):
        raise ConfigError(
            "train_only cannot stand beside moe.router_warmup, moe.upcycling or "
            "moe.expert_parallel, which say themselves what is trained when or where; "
            "leave them out."
        )
    return space


class _Trained:
    """The owners of trained rows."""

    def __init__(self, classes: set[str], groups: set[str]) -> None:
        self._classes, self._groups = classes, groups

    def __contains__(self, owner: RowKey) -> bool:
        known = {"class": self._classes, "groups": self._groups}.get(owner.kind, set())
        return bool(owner.names) and known.issuperset(owner.names)


def _trained_owners(space: LabelSpace, datasets: Sequence[str]) -> _Trained:
    rows = zip(space.dataset_names, space.dataset_classes, space.groups, strict=True)
    of_others: dict[str, set[str]] = dict(classes=set(), groups=set())
    for name, classes, group in rows:
        if name not in datasets:
            of_others["classes"] |= set(classes.values())
            of_others["groups"].add(group)
    return _Trained(
        set(space.classes) - of_others["classes"],
        set(space.groups) - of_others["groups"],
    )


class KeepRowsHook(Hook):
    """Keep rows of tensors fixed while the optimiser updates the others.

    Their gradients are zeroed, so that they do not count in the clipping norm, and
    their values are restored after each step, as momentum, weight decay and
    ExpertMeanDecayHook also move weights without a gradient. Batch norm statistics are
    frozen.

    Args:
        kept: A bool per row of each tensor, True if the row is frozen.
    """

    priority = "ABOVE_NORMAL"  # after ExpertMeanDecayHook, before weights are averaged

    def __init__(self, kept: Mapping[str, Tensor]) -> None:
        self._kept = kept
        self._values: dict[str, Tensor] = {}

    def before_train(self, runner: Runner) -> None:
        """Store the rows once weights are loaded."""
        for name, tensor in self._tensors(runner).items():
            rows = self._rows(name, tensor)
            self._values[name] = tensor.detach()[rows].clone()
            if tensor.requires_grad:
                tensor.register_hook(_WithoutRows(rows))

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Freeze batch norms; mmengine sets the model to training before each epoch."""
        for module in bare_model(runner).modules():
            if isinstance(module, _BatchNorm):
                module.eval()

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
    ) -> None:
        """Restore the rows."""
        with torch.no_grad():
            for name, tensor in self._tensors(runner).items():
                tensor[self._rows(name, tensor)] = self._values[name]

    def _tensors(self, runner: Runner) -> dict[str, Tensor]:
        model: nn.Module = bare_model(runner)
        found = dict([*model.named_parameters(), *model.named_buffers()])
        return {name: found[name] for name in self._kept if name in found}

    def _rows(self, name: str, tensor: Tensor) -> Tensor:
        return self._kept[name].to(tensor.device)


class _WithoutRows:
    """Tensor hook that zeroes the gradient of some rows."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __call__(self, gradient: Tensor) -> Tensor:
        shape = (-1,) + (1,) * (gradient.dim() - 1)
        return gradient.masked_fill(self._rows.view(shape), 0.0)
