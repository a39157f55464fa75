"""The progress bar of commands, trainings and evaluations."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

UNKNOWN = "unknown time"


class Bar(Progress):
    """Progress bar on a terminal, an occasional plain line in a file or pipe.

    It is silent outside of ``with``, or of ``start`` and ``stop``.

    Args:
        console: Where to draw (default: stderr).
        stays: Whether the last state stays on the screen.
        every_seconds: Seconds between plain lines.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        stays: bool = False,
        every_seconds: float = 15.0,
    ) -> None:
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
        self._stays, self._every_seconds = stays, every_seconds
        self._is_open = self._has_line = False
        self._task = self.add_task("", total=None, left=UNKNOWN, status="")

    def begin(
        self, what: str, total: int | None, *, done: int = 0, pace: Pace | None = None
    ) -> None:
        """Start a task of `total` steps; None if their number is unknown."""
        self._has_line, self._last_line = False, time.monotonic()
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
        if self._is_open and not self.console.is_terminal:
            self._print_if_due()

    def start(self) -> None:
        """Show the bar."""
        self._is_open = True
        super().start()

    def stop(self) -> None:
        """Hide the bar."""
        self._is_open = False
        super().stop()

    def _print_if_due(self) -> None:
        """Print a line after some time, and a last one if it stays, or others did."""
        task, now = self.tasks[0], time.monotonic()
        is_last = task.finished and (self._stays or self._has_line)
        if now - self._last_line < self._every_seconds and not is_last:
            return
        self._has_line, self._last_line = True, now
        total = "" if task.total is None else f"/{int(task.total)}"
        self.console.print(
            f"{task.description:>8} {int(task.completed)}{total}  "
            f"{task.fields['left']} left  {task.fields['status']}",
            highlight=False,
            markup=False,
        )


class Pace:
    """Mean seconds per step of a training or evaluation, for the time left.

    The weight of a step halves about every third of all steps: a few slow steps
    add their own time to the time left, not that of an equally slow rest.
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
