"""The work directory of a run, and the orderly end of the run.

The directory is locked by one process, and removed if nothing began. A full disk,
Ctrl-C, SIGTERM and non-finite losses end a run in one line, with the last checkpoint
and the command to continue.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mmengine.dist import broadcast_object_list, get_rank
from mmengine.fileio import FileClient, LocalBackend, get_file_backend
from mmengine.runner import BaseLoop

from damex.engine.console import ProgressHook
from damex.engine.resumption import latest_checkpoint
from damex.errors import ConfigError, DataError

if TYPE_CHECKING:
    from damex.engine.runner import MixtureRunner

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# Errors of scipy's matching if predictions are not finite.
MATCHING = ("matrix contains invalid numeric entries", "cost matrix is infeasible")
ECHO = 1.0  # seconds in which a parent process may pass on a signal that it got, too


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
        place = self.path / ".lock"
        try:
            file = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            return (
                f"{display_path(place)} cannot be opened: it is of another user. If "
                "no training of theirs runs there, delete it; or name another folder "
                "with --work-dir."
            )
        try:
            # Unlike flock, data loading processes do not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            while not _is_at(place, file):  # removed in between, by a run that ended
                os.close(file)
                file = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner, *logs = os.read(file, 4096).decode().splitlines() or ["unknown"]
            os.close(file)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return None
            if logs == [str(self.logs)]:  # both started in the same second
                self.logs = None
            return (
                f"{display_path(self.path)} is in use: process {owner} trains there. "
                "Wait for its end, stop it, or name another folder with --work-dir."
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


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def display_path(path: str | Path) -> str:
    """Return a path for messages: relative if it is below the current folder."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def is_local(
    out_dir: str,
    file_client_args: dict | None = None,
    *,
    backend_args: dict | None = None,
    **_: Any,
) -> bool:
    """Whether the backend of a checkpoint writes to a local folder."""
    if file_client_args is not None:
        client = FileClient.infer_client(file_client_args, out_dir)
        return isinstance(client.client, LocalBackend)
    backend = get_file_backend(out_dir, backend_args=backend_args)
    return isinstance(backend, LocalBackend)


def on_first(check: Callable[[], str | None]) -> str | None:
    """Run a check on the first process and broadcast its result."""
    problem = [check() if get_rank() == 0 else None]
    broadcast_object_list(problem)
    return problem[0]


@contextmanager
def orderly_end(runner: MixtureRunner) -> Iterator[None]:
    """End a block in one line on Ctrl-C, SIGTERM, full disks and divergence."""
    runner.is_running = True
    with _interruptible(runner):  # also while the run ends
        try:
            yield
            runner.check_interrupt()
        except BaseException as raised:
            # What follows a signal follows from it, such as workers that have ended.
            error = KeyboardInterrupt() if runner.signals else raised
            with ExitStack() as stack:
                if threading.current_thread() is threading.main_thread():
                    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
                    stack.callback(signal.signal, signal.SIGINT, before)
                _end_workers(runner)
            for hook in getattr(runner, "_hooks", ()):
                if isinstance(hook, ProgressHook):
                    hook.close()
            problem = _explain(runner, error)
            runner.folder.unlock()
            if not runner.has_begun and os.environ.get("RANK", "0") == "0":
                runner.folder.remove_traces()
            if problem is None:
                raise
            kind = ConfigError if isinstance(error, Exception) else KeyboardInterrupt
            raise kind(problem) from raised
        finally:
            runner.is_running = False
            runner.folder.unlock()


@contextmanager
def _interruptible(runner: MixtureRunner) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM stop a run after its iteration.

    The runner gets its time in ``signals``, and reads it whenever it calls hooks: in
    between, an exception could leave a queue of a data worker locked. One that comes
    more than `ECHO` seconds later has its usual effect, and so has the first before the
    run has begun. Under torchrun SIGTERM keeps its default, as processes that wait in
    C++ must end, too.
    """
    owner = os.getpid()
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
    if "RANK" not in os.environ:
        usual[signal.SIGTERM] = signal.SIG_DFL

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a data worker, which its loader ends
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        runner.signals.append(time.monotonic())
        if runner.signals[-1] - runner.signals[0] > ECHO:
            signal.signal(number, usual[number])
            signal.raise_signal(number)
        if not runner.has_begun and len(runner.signals) == 1:
            raise KeyboardInterrupt

    taken: list[int] = []
    if threading.current_thread() is threading.main_thread():
        taken = [one for one in usual if signal.getsignal(one) == usual[one]]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, usual[number])
        runner.signals = []


def _end_workers(runner: MixtureRunner) -> None:
    """End the data workers that wait for the next epoch, as their loader does."""
    for name in ("_train_loop", "_val_loop", "_test_loop"):
        loop = getattr(runner, name, None)
        loader = loop.dataloader if isinstance(loop, BaseLoop) else None
        iterator: Any = getattr(loader, "_iterator", None)
        if iterator is not None:
            with suppress(RuntimeError):  # torch's, if the signal ended one of them
                iterator._shutdown_workers()


def _explain(runner: MixtureRunner, error: BaseException) -> str | None:
    """The message for the user; None for an error that is not handled here."""
    text = str(error)
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted {_when(runner)}. {_saved(runner)}".strip()
    disk = error if isinstance(error, OSError) else error.__cause__
    if isinstance(disk, OSError) and disk.errno in DISK:
        folder = runner.folder.path
        if disk is error:
            where = display_path(disk.filename or folder)
            text = f"{where} cannot be written to ({disk.strerror}); free space."
        free = shutil.disk_usage(folder).free / 2**20
        return f"{text} {free:,.1f} MiB are free. {_saved(runner)}".strip()
    if isinstance(error, ValueError) and any(words in text for words in MATCHING):
        text = f"the predictions of iteration {runner.iter + 1} are not finite"
    elif not isinstance(error, FloatingPointError):
        return None
    optimization = runner.cfg.get("optim_wrapper") or {}
    rate = (optimization.get("optimizer") or {}).get("lr")
    return (
        f"the training diverged: {text}. Lower optim_wrapper.optimizer.lr (it is "
        f"{rate}), lengthen the warm-up in param_scheduler, or clip gradients "
        f"(optim_wrapper.clip_grad is {optimization.get('clip_grad')}). "
        f"{_saved(runner, resumes=False)}"
    )


def _when(runner: MixtureRunner) -> str:
    loop = getattr(runner, "_train_loop", None)
    if runner.has_begun and isinstance(loop, BaseLoop):
        return f"after {loop.iter} of {loop.max_iters} iterations"
    what = "evaluation" if runner.evaluates else "training"
    return f"{'during' if runner.has_begun else 'before'} the {what}"


def _saved(runner: MixtureRunner, *, resumes: bool = True) -> str:
    """The last checkpoint that this training wrote or resumed, and how to continue."""
    if not runner.has_begun or not isinstance(runner._train_loop, BaseLoop):
        return ""
    last = None
    with suppress(DataError):
        last = latest_checkpoint(runner.work_dir)
    iteration = runner.folder.iterations.get(Path(last or "").name)
    if last is None or iteration is None:
        return "No checkpoint was written yet."
    words = f"The last checkpoint is {display_path(last)} (iteration {iteration})."
    if not resumes:
        return (
            f"{words} Start from it with load_from={shlex.quote(display_path(last))}."
        )
    launch = {"none": "", "pytorch": "torchrun ... -m "}.get(runner.launcher, "... ")
    command = ["damex", "train", display_path(runner.written_config), "--resume"]
    if runner.launcher != "none":
        command += ["--launcher", runner.launcher]
    return f"{words} Continue with: {launch}{shlex.join(command)}"
