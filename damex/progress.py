"""The progress bar of commands, trainings and evaluations."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

UNKNOWN = "unknown time"


class Bar(Progress):
    """Progress bar on a terminal; silent in a file or pipe, and outside of ``with``.

    Args:
        console: Where to draw (default: stderr).
        stays: Whether the last state stays on the screen.
    """

    def __init__(self, console: Console | None = None, *, stays: bool = False) -> None:
        console = console or Console(stderr=True)
        super().__init__(
            TextColumn("{task.description:>8}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]} left  {task.fields[status]}", markup=False),
            console=console,
            transient=not stays,
            disable=not console.is_terminal,
        )
        self._task = self.add_task("", total=None, left=UNKNOWN, status="")

    def begin(
        self, what: str, total: int | None, *, done: int = 0, pace: Pace | None = None
    ) -> None:
        """Start a task of `total` steps; None if their number is unknown."""
        self._pace = pace or Pace(total or 0)
        self._pace.begin()
        self.reset(self._task, total=total, completed=done, description=what)
        self.update(self._task, left=UNKNOWN, status="")

    def step(self, status: str = "", *, done: int | None = None) -> None:
        """Complete a step; ``done`` is the number of completed ones if one counts."""
        self._pace.step()
        task = self.tasks[0]
        done = int(task.completed) + 1 if done is None else done
        left = (
            UNKNOWN if task.total is None else self._pace.left(int(task.total) - done)
        )
        self.update(self._task, completed=done, left=left, status=status)


class Pace:
    """Mean seconds per step of a training or evaluation, for the time left.

    The weight of a step halves about every third of all steps: a few slow steps change
    the time left by what they took, and not by what as slow a rest would take.
    """

    def __init__(self, total: int) -> None:
        self._decay = 1.0 - 2.0 / max(total, 4)
        self._seconds = self._weight = 0.0
        self.begin()

    def begin(self) -> None:
        """Start the clock, at the beginning and after an interruption."""
        self._since = time.monotonic()

    def step(self) -> None:
        """Count the time since the last step."""
        now = time.monotonic()
        self._seconds = self._decay * self._seconds + now - self._since
        self._weight = self._decay * self._weight + 1.0
        self._since = now

    def left(self, steps: int) -> str:
        """Return the time that more steps will take, as hours:minutes:seconds."""
        return str(timedelta(seconds=round(steps * self._seconds / self._weight)))
