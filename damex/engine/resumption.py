"""Resuming in the middle of an epoch, without repeating its images."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from mmdet.datasets.samplers import AspectRatioBatchSampler
from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, _ParamScheduler
from mmengine.runner import BaseLoop, IterBasedTrainLoop, Runner
from torch.utils.data import BatchSampler

from damex.datasets.sampler import MixtureSampler

KEY = "data_progress"


@HOOKS.register_module()
class DataProgressHook(Hook):
    """Resume ``CheckpointHook(by_epoch=False)`` checkpoints in mid-epoch.

    mmengine restarts the epoch, so that images repeat and training takes longer than
    planned. Checkpoints get ``meta['data_progress']``: the order of the samples and,
    for each run since the epoch began (an iteration-based training is one epoch), the
    number of processes, their batch size and the batches used by each. If these change,
    iterations are counted in batches of the resumed run, and the schedules are
    replayed.
    """

    priority = "VERY_HIGH"

    def __init__(self) -> None:
        self._passes: list[Sequence[int]] = []  # of this epoch, in earlier runs
        self._batches = 0  # of this epoch, in this run

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
    ) -> None:
        """Count the batches used, not those prefetched by workers."""
        self._batches += 1

    def after_train_epoch(self, runner: Runner) -> None:
        """Begin a new epoch; an iteration-based loop has only one."""
        if not isinstance(runner.train_loop, IterBasedTrainLoop):
            self._passes, self._batches = [], 0

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Save the data progress."""
        batches = _batches_of(runner)
        if batches is not None:
            seen = [*_layout(runner, batches), self._batches]
            checkpoint["meta"][KEY] = dict(
                order=batches.sampler.order(), passes=[*self._passes, seen]
            )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Skip the images seen, if the run is resumed."""
        loop = runner._train_loop
        if not (runner._resume and isinstance(loop, BaseLoop)):
            return
        progress, batches = checkpoint["meta"].get(KEY), _batches_of(runner)
        is_known = progress is not None and batches is not None
        if is_known and batches.sampler.take_over(progress["order"]):
            self._passes = progress["passes"]
            if isinstance(loop, IterBasedTrainLoop):
                self._go_on_by_iterations(runner, batches)
            else:
                self._go_on_by_epochs(runner, batches, checkpoint)
        elif _is_inside(checkpoint["meta"], loop):
            _warn(
                runner,
                "the checkpoint does not tell which images of the epoch were seen (it "
                "is of another mixture or sampler, or of an earlier version of damex); "
                "the epoch begins again.",
            )

    def _go_on_by_epochs(self, runner: Runner, batches: Any, checkpoint: dict) -> None:
        loop: Any = runner.train_loop
        meta = checkpoint["meta"]
        left = batches.sampler.leave_out(meta["epoch"], self._passes, batches)
        length = len(loop.dataloader)
        loop._max_iters = loop.max_epochs * length  # same epoch length as before
        meta["iter"] = (meta["epoch"] + 1) * length - left
        if _tell_change(runner, batches, self._passes):
            _reschedule(runner, checkpoint, length=length)

    def _go_on_by_iterations(self, runner: Runner, batches: Any) -> None:
        """Skip samples unless batch sizes may vary, which is left to mmengine."""
        changed = _tell_change(runner, batches, self._passes)
        sampler = batches.sampler
        if sampler.infinite and type(batches) is BatchSampler:
            samples = sum(world * size * used for world, size, used in self._passes)
            sampler.leave_out_first(samples)
        elif changed:
            _warn(
                runner,
                "which images were seen is known only with train_dataloader.sampler."
                "infinite=True and train_dataloader.batch_sampler=None; some are left "
                "out or seen again.",
            )


def go_through(
    schedulers: Sequence[_ParamScheduler], *, epochs: int, iters: int, length: int
) -> None:
    """Step schedulers, in place, as a training of `iters` steps does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing optimiser steps
        for iteration in range(1, iters + 1):
            epoch, inside = divmod(iteration, length)
            for scheduler in schedulers:
                if not scheduler.by_epoch or (inside == 0 and epoch <= epochs):
                    scheduler.step()


def _reschedule(runner: Runner, checkpoint: dict, *, length: int) -> None:
    """Replace the schedules of a checkpoint by those of the config."""
    schedulers = runner.param_schedulers
    is_plain = isinstance(schedulers, list) and isinstance(
        runner.optim_wrapper, OptimWrapper
    )
    if not is_plain or any(hasattr(one, "need_val_args") for one in schedulers):
        return
    epochs, iters = (checkpoint["meta"][key] for key in ("epoch", "iter"))
    go_through(schedulers, epochs=epochs, iters=iters, length=length)
    checkpoint.pop("param_schedulers", None)
    saved = checkpoint.get("optimizer", {})
    groups = [*saved.get("param_groups", ()), saved.get("base_param_settings")]
    for group, own in zip(groups, runner.optim_wrapper.param_groups, strict=False):
        group.update({one.param_name: own[one.param_name] for one in schedulers})


def _batches_of(runner: Runner) -> Any:
    """The batch sampler of a mixture; None if it cannot be replayed."""
    batches: Any = getattr(runner.train_dataloader, "batch_sampler", None)
    is_known = type(batches) in (BatchSampler, AspectRatioBatchSampler)
    if is_known and isinstance(batches.sampler, MixtureSampler):
        return batches
    return None


def _is_inside(meta: dict, loop: Any) -> bool:
    """Whether a checkpoint was written in mid-epoch, as far as it tells."""
    if isinstance(loop, IterBasedTrainLoop):
        return False
    if KEY in meta:
        return any(used for _, _, used in meta[KEY]["passes"])
    return meta["iter"] != meta["epoch"] * len(loop.dataloader)


def _layout(runner: Runner, batches: Any) -> list[int]:
    return [runner.world_size, batches.batch_size]


def _tell_change(runner: Runner, batches: Any, passes: Sequence[Sequence[int]]) -> bool:
    """Warn if the total batch size changed, and return whether it did."""
    (world, size, _), own = passes[-1], _layout(runner, batches)
    if [world, size] == own:
        return False
    _warn(
        runner,
        f"a batch of all processes was {world} x {size} images and is now {own[0]} x "
        f"{own[1]} (processes x batch_size); the learning rate is that of the config, "
        "which --auto-scale-lr would fit to it.",
    )
    return True


def _warn(runner: Runner, words: str) -> None:
    runner.logger.log(logging.WARNING, f"--resume: {words}")
