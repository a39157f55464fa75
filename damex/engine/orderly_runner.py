"""A runner that loses nothing when interrupted."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_sharer
from multiprocessing.popen_fork import Popen
from multiprocessing.queues import Queue
from pathlib import Path
from types import FrameType
from typing import Any

from mmengine.dist import broadcast_object_list
from mmengine.fileio import FileClient, LocalBackend, get_file_backend
from mmengine.logging import MMLogger
from mmengine.runner import BaseLoop
from torch import nn

from damex.engine.console import ProgressHook
from damex.engine.resumption import latest_checkpoint
from damex.engine.sharding import ShardedRunner
from damex.engine.work_dir import WorkDir, shown
from damex.errors import ConfigError, DataError
from damex.files import atomic_write

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# Errors of scipy's matching if predictions are not finite.
MATCHING = ("matrix contains invalid numeric entries", "cost matrix is infeasible")


class OrderlyRunner(ShardedRunner):
    """mmengine's Runner with an orderly end: one line in place of a traceback.

    It locks its work directory. A full disk, Ctrl-C and non-finite losses end it with
    the last checkpoint and the command to continue. Checkpoints and the config are
    written atomically, and a failed start leaves no files behind.
    """

    has_begun = False  # to train or to evaluate
    is_running = False
    evaluates = False
    signals: Collection[int] = ()
    _load_from: Any

    def __init__(self, model: Any, work_dir: str, **kwargs: Any) -> None:
        self.folder = WorkDir(work_dir)
        with _orderly(self):
            super().__init__(model, work_dir, **kwargs)

    def setup_env(self, env_cfg: dict) -> None:
        """Set up processes and note the log folder, which is named by the timestamp."""
        super().setup_env(env_cfg)
        self.folder.logs = self.folder.path / self.timestamp

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger; a full disk raises an error in place of a traceback."""
        logger = super().build_logger(*args, **kwargs)
        for handler in logger.handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handleError = self._log_failed  # type: ignore[method-assign]
        return logger

    def _log_failed(self, record: logging.LogRecord) -> None:
        """Raise the error of a line that could not be written, during a run only."""
        error = sys.exc_info()[1]
        if self.is_running and isinstance(error, OSError):
            raise error

    def build_visualizer(self, visualizer: Any = None) -> Any:
        """Build a visualizer for this run; by its name, another would be reused."""
        if isinstance(visualizer, dict):
            visualizer = {**visualizer, "name": f"{self.log_dir}/{time.monotonic_ns()}"}
        return super().build_visualizer(visualizer)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call hooks, unless the run was interrupted."""
        self.check_interrupt()
        super().call_hook(fn_name, **kwargs)

    def check_interrupt(self) -> None:
        """Raise an interrupt that Python ignored, in a destructor or at a fork."""
        if self.signals:
            raise KeyboardInterrupt

    def check_start(self) -> None:
        """Reject a training that cannot work; a hook for subclasses."""

    def on_first(self, check: Callable[[], str | None]) -> str | None:
        """Run a check on the first process and broadcast its result."""
        fault = [check() if self.rank == 0 else None]
        broadcast_object_list(fault)
        return fault[0]

    def train(self) -> nn.Module:
        """Train as configured.

        Raises:
            ConfigError: If another process trains in the work directory, the disk is
                full, or losses are not finite; and see `check_start`.
            KeyboardInterrupt: On Ctrl-C and SIGTERM, with a line for the user.
        """
        with _orderly(self):
            if in_use := self.on_first(self.folder.lock):
                raise ConfigError(in_use)
            self.check_start()
            return super().train()

    def val(self) -> dict:
        """Evaluate on the validation data; see mmengine."""
        self.evaluates = True
        with _orderly(self):
            return super().val()

    def test(self) -> dict:
        """Evaluate on the test data; see mmengine."""
        self.evaluates = True
        with _orderly(self):
            return super().test()

    def load_or_resume(self) -> None:
        """Load or resume as configured; ConfigError if nothing can be resumed."""
        if self._resume and self._load_from is None and not self._has_loaded:
            self._load_from = latest_checkpoint(self.work_dir)
            if self._load_from is None:
                raise ConfigError(
                    f"--resume: {self.work_dir} holds no checkpoint of an earlier run "
                    "(no file last_checkpoint). Start without --resume, or name the "
                    "folder with --work-dir."
                )
        super().load_or_resume()
        if self._resume and not self.evaluates:
            self.folder.iterations[Path(self._load_from).name] = self.iter
        self.has_begun = True
        self.dump_config()

    def dump_config(self) -> None:
        """Write the config once the run has begun; evaluation keeps a training's."""
        written = self.written_config
        is_kept = self.evaluates and written.exists()
        if self.has_begun and self.rank == 0 and not is_kept:
            with atomic_write(written) as part:
                self.cfg.dump(part)

    @property
    def written_config(self) -> Path:
        """The config in the work directory, from which a training can be resumed."""
        return self.folder.path / Path(self.cfg.filename or f"{self.timestamp}.py").name

    def save_checkpoint(
        self, out_dir: str, filename: str, *args: Any, **kwargs: Any
    ) -> None:
        """Save atomically; called on every process, written by the first."""
        if self.rank != 0 or not _is_local(out_dir, *args[:1], **kwargs):
            super().save_checkpoint(out_dir, filename, *args, **kwargs)
            return
        with atomic_write(Path(out_dir) / filename) as part:
            super().save_checkpoint(str(part.parent), part.name, *args, **kwargs)
        if kwargs.get("meta"):
            self.folder.iterations[filename] = kwargs["meta"]["iter"]


def _is_local(
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


@contextmanager
def _orderly(runner: OrderlyRunner) -> Iterator[None]:
    """End a block in one line on Ctrl-C, SIGTERM, full disks and divergence."""
    others = {*multiprocessing.active_children()}
    runner.is_running = True
    with _interruptible() as signals:
        runner.signals = signals
        try:
            yield
            runner.check_interrupt()
        except BaseException as raised:
            # mmengine turns an interrupt during config dumping into a SyntaxError.
            error = KeyboardInterrupt() if signals else raised
            _kill_children(others)
            for hook in getattr(runner, "_hooks", ()):
                if isinstance(hook, ProgressHook):
                    hook.close()
            fault = _fault(runner, error)
            runner.folder.unlock()
            if not runner.has_begun and os.environ.get("RANK", "0") == "0":
                runner.folder.remove_traces()
            if fault is None:
                raise
            kind = ConfigError if isinstance(error, Exception) else KeyboardInterrupt
            raise kind(fault) from raised
        finally:
            runner.is_running = False
            runner.signals = ()
            runner.folder.unlock()


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Let SIGTERM interrupt like Ctrl-C, except in data workers.

    Under torchrun SIGTERM keeps its default, as processes that wait in C++ must end,
    too. Yields the signals received.
    """
    owner = os.getpid()
    usual: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler}
    if "RANK" not in os.environ:
        usual[signal.SIGTERM] = signal.SIG_DFL

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            signals.append(number)
            if not _talks_to_worker(frame):
                raise KeyboardInterrupt
        if number == signal.SIGTERM:
            os._exit(128 + number)

    signals: list[int] = []
    taken = []
    if threading.current_thread() is threading.main_thread():
        taken = [one for one in usual if signal.getsignal(one) == usual[one]]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield signals
    finally:
        for number in taken:
            signal.signal(number, usual[number])


def _talks_to_worker(frame: FrameType | None) -> bool:
    """Whether a process starts a data worker, or sends to or receives from it.

    An exception would leave locks taken, for which the process waits at its end, and
    print tracebacks.
    """
    atomic = (Queue.put.__code__, Popen.__init__.__code__)
    while frame is not None:
        code = frame.f_code
        if code in atomic or code.co_filename == resource_sharer.__file__:
            return True
        frame = frame.f_back
    return False


def _kill_children(others: Collection[Any]) -> None:
    """Kill the processes started since `others` were listed."""
    started = {*multiprocessing.active_children()} - {*others}
    if not started or threading.current_thread() is not threading.main_thread():
        return
    # torch's SIGCHLD handler raises an error when a worker ends.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in started:
        process.kill()
    for process in started:
        process.join()
    signal.signal(signal.SIGCHLD, before)


def _fault(runner: OrderlyRunner, error: BaseException) -> str | None:
    """The message for the user; None for an error that is not handled here."""
    text = str(error)
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted {_when(runner)}. {_saved(runner)}".strip()
    disk = error if isinstance(error, OSError) else error.__cause__
    if isinstance(disk, OSError) and disk.errno in DISK:
        folder = runner.folder.path
        if disk is error:
            where = shown(disk.filename or folder)
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


def _when(runner: OrderlyRunner) -> str:
    loop = getattr(runner, "_train_loop", None)
    if runner.has_begun and isinstance(loop, BaseLoop):
        return f"after {loop.iter} of {loop.max_iters} iterations"
    what = "evaluation" if runner.evaluates else "training"
    return f"{'during' if runner.has_begun else 'before'} the {what}"


def _saved(runner: OrderlyRunner, *, resumes: bool = True) -> str:
    """The last checkpoint that this training wrote or resumed, and how to continue."""
    if not runner.has_begun or not isinstance(runner._train_loop, BaseLoop):
        return ""
    last = None
    with suppress(DataError):
        last = latest_checkpoint(runner.work_dir)
    iteration = runner.folder.iterations.get(Path(last or "").name)
    if last is None or iteration is None:
        return "No checkpoint was written yet."
    words = f"The last checkpoint is {shown(last)} (iteration {iteration})."
    if not resumes:
        return f"{words} Start from it with load_from={shlex.quote(shown(last))}."
    launch = {"none": "", "pytorch": "torchrun ... -m "}.get(runner.launcher, "... ")
    command = ["damex", "train", shown(runner.written_config), "--resume"]
    if runner.launcher != "none":
        command += ["--launcher", runner.launcher]
    return f"{words} Continue with: {launch}{shlex.join(command)}"
