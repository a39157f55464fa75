"""``train_only=[...]``: train only the parts that belong to some datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from damex.datasets.label_space import LabelSpace
from damex.engine.hooks import bare_model
from damex.engine.rows import RowNames, check_declared, has_groups, row_keys
from damex.errors import ConfigError, check_known
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
    check_declared(model)
    # A command line parses 2019 as a number.
    trained = _trained_names(space, [str(name) for name in datasets])
    owners = row_keys(model, model.state_dict(), RowNames.of_space(space))
    kept = {}
    for key, rows in owners.items():
        is_trained = [
            bool(owner.names) and trained.get(owner.kind, set()).issuperset(owner.names)
            for owner in rows
        ]
        if any(is_trained):
            kept[key] = ~torch.tensor(is_trained)
    if not kept:
        raise ConfigError(
            f"train_only={list(datasets)!r}: all classes and experts of these datasets "
            "are shared with others, so that nothing would be trained; name all "
            "datasets of a group, or leave train_only out."
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

    If a dataset has one expert, and it has weight 1, its router cannot change a
    detection of an unnamed dataset. Frozen rows could not learn to tell old images from
    new ones.
    """
    found = set()
    for name, block in model.named_modules():
        gate = block.moe.gate if has_groups(block) else None
        is_whole = isinstance(gate, TopKGate) and gate.k == 1 and gate.renormalize
        if is_whole and (block.moe.group_experts_GE.sum(1) == 1).all():
            parameters = block.moe.router.named_parameters()
            found |= {f"{name}.moe.router.{key}" for key, _ in parameters}
    return found


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
        words = f"train_only: the mixture has no dataset {name!r}"
        check_known(name, space.dataset_names, words)
    if model.trains_in_stages or any(b.moe.shards for b in moe_blocks(model)):
        raise ConfigError(
            "train_only cannot be combined with moe.router_warmup, moe.upcycling or "
            "moe.expert_parallel, which decide themselves which parts are trained; "
            "leave one of them out."
        )
    return space


def _trained_names(space: LabelSpace, datasets: Sequence[str]) -> dict[str, set[str]]:
    """Classes and groups that only the given datasets have, by kind of row owner."""
    classes, groups = set(space.classes), set(space.groups)
    for name, mapping, group in zip(
        space.dataset_names, space.dataset_classes, space.groups, strict=True
    ):
        if name not in datasets:
            classes -= set(mapping.values())
            groups -= {group}
    return {"class": classes, "groups": groups}


class FreezeRowsHook(Hook):
    """Keep rows of tensors fixed while the optimizer updates the others.

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
        for name, tensor, rows in self._tensors(runner):
            self._values[name] = tensor.detach()[rows].clone()
            if tensor.requires_grad:
                view = rows.view(-1, *[1] * (tensor.dim() - 1))
                tensor.register_hook(lambda grad, view=view: grad.masked_fill(view, 0))

    def before_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Freeze batch norms; mmengine sets the model to training before each epoch."""
        for module in bare_model(runner).modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        self.after_train_iter(runner)  # gates have moved with their schedules

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Restore the rows."""
        with torch.no_grad():
            for name, tensor, rows in self._tensors(runner):
                tensor[rows] = self._values[name]

    def _tensors(self, runner: Runner) -> list[tuple[str, Tensor, Tensor]]:
        """Name, tensor and frozen rows."""
        model = bare_model(runner)
        found = dict([*model.named_parameters(), *model.named_buffers()])
        return [
            (name, found[name], rows.to(found[name].device))
            for name, rows in self._kept.items()
            if name in found
        ]
