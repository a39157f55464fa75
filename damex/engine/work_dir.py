"""The work directory of a run: a lock for trainings, and safely written checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmdet.registry import HOOKS
from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook as MMEngineCheckpointHook
from mmengine.runner import Runner

from damex.errors import ConfigError, DataError
from damex.files import write_text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class WorkDir:
    """The work directory of a run; missing folders are created.

    Attributes:
        logs: The log folder of this run, once it is known.
        iterations: Iterations of the checkpoints, by file name.

    Raises:
        ConfigError: If it is not writable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.logs: Path | None = None
        self.iterations: dict[str, int] = {}
        parents = (self.path, *self.path.parents)
        self._made = [parent for parent in parents if not parent.exists()]
        self._lock: int | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            self.remove_traces()
            raise ConfigError(
                f"work_dir={str(path)!r} cannot be written ({error.strerror}); name "
                "another folder, for instance with --work-dir."
            ) from error

    def lock(self) -> str | None:
        """Lock out other trainings; returns why the folder cannot be used, or None."""
        if fcntl is None:
            return None
        file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # Unlike flock, data loading processes do not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner, *logs = os.read(file, 4096).decode().splitlines() or ["unknown"]
            os.close(file)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return None
            if logs == [str(self.logs)]:  # both started in the same second
                self.logs = None
            return (
                f"{shown(self.path)} is in use: process {owner} trains there. Wait for "
                "its end, stop it, or name another folder with --work-dir."
            )
        self._lock = file
        os.truncate(file, 0)
        os.write(file, f"{os.getpid()} on {socket.gethostname()}\n{self.logs}".encode())
        for part in self.path.glob(".part-*.pth"):  # from a killed training
            part.unlink(missing_ok=True)
        return None

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            (self.path / ".lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def remove_traces(self) -> None:
        """Remove the files of a run that failed before it began."""
        if self.logs is not None:
            shutil.rmtree(self.logs, ignore_errors=True)
        for folder in self._made:
            with suppress(OSError):  # in use by others
                folder.rmdir()


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
    fault = f"names {named}, which is missing" if named else "is empty"
    raise DataError(f"{marker} {fault}; resume with --resume {newest}.")


def shown(path: str | Path) -> str:
    """Return a path for messages: relative if it is below the current folder."""
    path = Path(path)
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@HOOKS.register_module()
class CheckpointHook(MMEngineCheckpointHook):
    """mmengine's hook, but old checkpoints are removed only after the next is written.

    A run that is killed or fills the disk keeps its last and its best checkpoint, even
    with ``max_keep_ckpts=1``.
    """

    file_backend: Any
    best_ckpt_path: str | None

    def before_train(self, runner: Runner) -> None:
        """Prepare; paths of a copied work directory point into the copy."""
        super().before_train(runner)
        if best := getattr(self, "best_ckpt_path", None):
            self.best_ckpt_path = self._here(best)
        for key, path in getattr(self, "best_ckpt_path_dict", {}).items():
            self.best_ckpt_path_dict[key] = path and self._here(path)

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
        if self.file_backend.isdir(path):  # a DeepSpeed checkpoint
            self.file_backend.rmtree(path)
        elif self.file_backend.isfile(path):
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

    rmtree = remove
