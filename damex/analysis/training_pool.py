"""Several trainings at a time, none of which outlives the command that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from damex.analysis.training_run import TrainingRun

__all__ = ["run_all"]

POLL_SECONDS = 0.5


def run_all(
    runs: Sequence[TrainingRun], *, jobs: int, threads: int
) -> Iterator[tuple[TrainingRun, int]]:
    """Start trainings in their order and hand them over in the order of their ends.

    Args:
        runs: The trainings.
        jobs: How many run at a time.
        threads: Threads of each.

    Yields:
        A training and its exit status.
    """
    waiting = list(runs)
    active: dict[TrainingRun, subprocess.Popen[bytes]] = {}
    with _sigterm_unwinds():
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    run = waiting.pop(0)
                    active[run] = run.start(threads=threads)
                time.sleep(POLL_SECONDS)
                for run, process in list(active.items()):
                    if process.poll() is not None:
                        del active[run]
                        yield run, process.returncode
        finally:
            _end(list(active.values()))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let a terminated command clean up as an interrupted one does.

    By default SIGTERM, which schedulers and ``kill`` send, ends Python on the spot, and
    the trainings would go on alone.
    """

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
