"""The work directory of a run: locked by one process, removed if nothing began."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from damex.errors import ConfigError

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
        place = self.path / ".lock"
        file = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
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


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def shown(path: str | Path) -> str:
    """Return a path for messages: relative if it is below the current folder."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
