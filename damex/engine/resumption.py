"""Checkpoints of a run: written safely, found again, and resumed in mid-epoch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

from mmdet.datasets.samplers import AspectRatioBatchSampler
from mmdet.registry import HOOKS
from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook as MMEngineCheckpointHook
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, _ParamScheduler
from mmengine.runner import BaseLoop, CheckpointLoader, IterBasedTrainLoop, Runner
from torch.utils.data import BatchSampler

from damex.datasets.sampler import MixtureSampler
from damex.engine.hooks import bare_model
from damex.engine.optimizer_state import optimizer_of
from damex.errors import ConfigError, DataError, did_you_mean
from damex.files import write_text

KEY = "data_progress"
GRADIENTS = "gradients"  # in a checkpoint, between two optimizer steps
EVALUATED = "evaluated"  # in the message hub: the iteration of the last evaluation


def latest_checkpoint(folder: str | Path) -> str | None:
    """Return path or URL of the last checkpoint; None without ``last_checkpoint``.

    mmengine stores an absolute path. A checkpoint of that name in the folder itself
    takes precedence, so that a copied folder does not lead to the original.

    Raises:
        DataError: If that file is empty, or names a missing checkpoint.
    """
    marker = Path(folder) / "last_checkpoint"
    if not marker.is_file():
        return None
    named = marker.read_text(encoding="utf-8").strip()
    here = marker.parent / Path(named).name
    if here.is_file():
        return str(here)
    if named and ("://" in named or Path(named).is_file()):
        return named
    known = [*Path(folder).glob("epoch_*.pth"), *Path(folder).glob("iter_*.pth")]
    newest = max(known, key=lambda path: path.stat().st_mtime, default="CHECKPOINT")
    problem = f"names {named}, which is missing" if named else "is empty"
    raise DataError(f"{marker} {problem}; resume with --resume {newest}.")


@HOOKS.register_module()
class CheckpointHook(MMEngineCheckpointHook):
    """mmengine's hook, but old checkpoints are removed only after the next is written.

    A run that is killed or fills the disk keeps its last and its best checkpoint, even
    with ``max_keep_ckpts=1``, and a resumed one knows the best score so far.
    """

    file_backend: Any
    best_ckpt_path: str | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except (TypeError, ValueError) as error:  # such as save_best="foo"
            raise ConfigError(f"default_hooks.checkpoint: {error}") from error
        for name in self.args:  # which mmengine passes on when it saves, too late
            options = signature(MMEngineCheckpointHook).parameters
            hint = did_you_mean(name, [*options][:-1])
            raise ConfigError(f"default_hooks.checkpoint: unknown {name}; {hint}")

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Take over the best score from a best checkpoint of the same iteration.

        A run that is killed after it wrote the best checkpoint could not add the score
        to the one to resume from.
        """
        if not _resumes(runner):
            return
        meta = checkpoint["meta"]
        for file in sorted(Path(runner._load_from).parent.glob("best_*.pth")):
            with suppress(DataError):  # cut off
                best = CheckpointLoader.load_checkpoint(str(file), map_location="cpu")
                theirs, hub = best.get("meta") or {}, best.get("message_hub") or {}
                is_of_run = theirs.get("experiment_name") == meta["experiment_name"]
                if is_of_run and theirs.get("iter") == meta["iter"]:
                    for part in ("runtime_info", "resumed_keys"):
                        checkpoint["message_hub"][part].update(
                            (key, value)
                            for key, value in hub[part].items()
                            if key.startswith("best_")
                        )

    def before_train(self, runner: Runner) -> None:
        """Prepare; paths of a copied work directory point into the copy."""
        super().before_train(runner)
        if best := getattr(self, "best_ckpt_path", None):
            self.best_ckpt_path = self._fetched(runner, best)
        for key, path in getattr(self, "best_ckpt_path_dict", {}).items():
            self.best_ckpt_path_dict[key] = path and self._fetched(runner, path)

    def _fetched(self, runner: Runner, path: str) -> str:
        """The best checkpoint in this folder, copied if another folder's is resumed."""
        here = self._here(path)
        beside = Path(runner._load_from or "").parent / Path(path).name
        is_missing = beside.is_file() and not self.file_backend.exists(here)
        if is_missing and is_main_process():
            self.file_backend.copyfile_from_local(beside, here)
        return here

    def after_val_epoch(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Note the evaluation, then save the best checkpoint."""
        runner.message_hub.update_info(EVALUATED, runner.iter)
        super().after_val_epoch(runner, metrics)

    def _here(self, path: str) -> str:
        return self.file_backend.join_path(self.out_dir, Path(path).name)

    def _save_checkpoint_with_step(
        self, runner: Runner, step: int, meta: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint, then mark it as the last, then remove the oldest."""
        outdated = []
        if self.max_keep_ckpts > 0 and step not in self.keep_ckpt_ids:
            if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
                outdated.append(self.keep_ckpt_ids.popleft())
            self.keep_ckpt_ids.append(step)
            runner.message_hub.update_info("keep_ckpt_ids", [*self.keep_ckpt_ids])
        name = self.filename_tmpl.format(step)
        self.last_ckpt = self._here(name)
        runner.message_hub.update_info("last_ckpt", self.last_ckpt)
        runner.save_checkpoint(
            self.out_dir,
            name,
            self.file_client_args,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            backend_args=self.backend_args,
            **self.args,
        )
        if is_main_process():
            write_text(Path(runner.work_dir) / "last_checkpoint", self.last_ckpt)
            for old in outdated:
                self._remove(self._here(self.filename_tmpl.format(old)))

    def _save_best_checkpoint(
        self, runner: Runner, metrics: Mapping[str, float]
    ) -> None:
        """Write the best checkpoint, then remove the previous best."""
        backend = self.file_backend
        later = _RemovesLater(backend)
        self.file_backend = later
        try:
            super()._save_best_checkpoint(runner, metrics)
        finally:
            self.file_backend = backend
        best = getattr(self, "best_ckpt_path_dict", {}).values()
        for path in later.outdated - {getattr(self, "best_ckpt_path", None), *best}:
            self._remove(path)

    def _remove(self, path: str) -> None:
        if self.file_backend.isfile(path):
            self.file_backend.remove(path)


class _RemovesLater:
    """File backend that records removals for later."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.outdated: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        """Record a path to remove."""
        self.outdated.add(path)


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

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
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
            seen = [runner.world_size, batches.batch_size, self._batches]
            checkpoint["meta"][KEY] = dict(
                order=batches.sampler.order(), passes=[*self._passes, seen]
            )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Skip the images seen, if the run is resumed."""
        if not _resumes(runner):
            return
        loop: Any = runner.train_loop
        meta, batches = checkpoint["meta"], _batches_of(runner)
        progress = meta.get(KEY)
        is_known = progress is not None and batches is not None
        if is_known and batches.sampler.load_state(progress["order"]):
            self._passes = progress["passes"]
            self._resume(runner, batches, checkpoint)
        elif not isinstance(loop, IterBasedTrainLoop) and (
            any(used for _, _, used in progress["passes"])
            if progress
            else meta["iter"] != meta["epoch"] * len(loop.dataloader)
        ):
            runner.logger.warning(
                "--resume: the checkpoint does not record which images of the epoch "
                "were seen (it is of another mixture or sampler, or of an earlier "
                "version of damex); the epoch begins again."
            )

    def _resume(self, runner: Runner, batches: Any, checkpoint: dict) -> None:
        """Skip samples unless batch sizes may vary, which is left to mmengine."""
        loop: Any = runner.train_loop
        meta, sampler = checkpoint["meta"], batches.sampler
        then, now = [*self._passes[-1][:2]], [runner.world_size, batches.batch_size]
        if then != now:
            runner.logger.warning(
                f"--resume: a batch of all processes was {then[0]} x {then[1]} images "
                f"and is now {now[0]} x {now[1]} (processes x batch_size); the "
                "learning rate is that of the config, which --auto-scale-lr would "
                "adapt to it."
            )
        if not isinstance(loop, IterBasedTrainLoop):
            left = sampler.skip_seen(meta["epoch"], self._passes, batches)
            length = len(loop.dataloader)
            loop._max_iters = loop.max_epochs * length  # same epoch length as before
            meta["iter"] = (meta["epoch"] + 1) * length - left
            if then != now:
                _reschedule(runner, checkpoint, length=length)
        elif type(batches) is BatchSampler:
            sampler.skip_first(self._passes, drop_last=batches.drop_last)
        elif then != now:
            runner.logger.warning(
                "--resume: which images were seen is known only with train_dataloader."
                "batch_sampler=None; some are left out or seen again."
            )


@HOOKS.register_module()
class AccumulationHook(Hook):
    """Resume between two optimizer steps, with the gradients accumulated so far.

    If the iterations of a checkpoint are not a multiple of
    ``optim_wrapper.accumulative_counts``, it gets these gradients, which mmengine
    loses. Only in one process: each of several has gradients of its own until the step.
    """

    priority = "VERY_HIGH"

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Save the gradients; the first process alone is asked."""
        wrapper = runner.optim_wrapper
        is_one = "optimizer" in checkpoint and optimizer_of(wrapper) is not None
        if not is_one or runner.world_size > 1 or wrapper.should_update():
            return
        values = {
            name: parameter.grad.detach().cpu()
            for name, parameter in bare_model(runner).named_parameters()
            if parameter.grad is not None
        }
        checkpoint[GRADIENTS] = dict(counts=wrapper._accumulative_counts, values=values)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Take over the gradients if the next step needs them; warn without them."""
        counts = getattr(runner.optim_wrapper, "_accumulative_counts", 1)
        if not _resumes(runner) or checkpoint["meta"]["iter"] % counts == 0:
            return
        stored = checkpoint.get(GRADIENTS) or {}
        if stored.get("counts") == counts and runner.world_size == 1:
            for name, parameter in bare_model(runner).named_parameters():
                if name in stored["values"]:
                    parameter.grad = stored["values"][name].to(parameter)
            return
        runner.logger.warning(
            f"--resume: the checkpoint lies between two optimizer steps ({counts} "
            "iterations each), and holds no gradients that fit: there are several "
            "processes, or accumulative_counts has changed. The next step has the "
            "gradients of fewer iterations."
        )


def fast_forward(
    schedulers: Sequence[_ParamScheduler], *, epochs: int, iters: int, length: int
) -> None:
    """Step schedulers, in place, as a training of `iters` steps does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing optimizer steps
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
    fast_forward(schedulers, epochs=epochs, iters=iters, length=length)
    checkpoint.pop("param_schedulers", None)
    saved = checkpoint.get("optimizer", {})
    groups = [*saved.get("param_groups", ()), saved.get("base_param_settings")]
    for group, own in zip(groups, runner.optim_wrapper.param_groups, strict=False):
        group.update({one.param_name: own[one.param_name] for one in schedulers})


def _resumes(runner: Runner) -> bool:
    """Whether a training resumes; an evaluation ignores ``resume=True``."""
    return runner._resume and isinstance(runner._train_loop, BaseLoop)


def _batches_of(runner: Runner) -> Any:
    """The batch sampler of a mixture; None if it cannot be replayed."""
    batches: Any = getattr(runner.train_dataloader, "batch_sampler", None)
    is_known = type(batches) in (BatchSampler, AspectRatioBatchSampler)
    if is_known and isinstance(batches.sampler, MixtureSampler):
        return batches
    return None
