"""Progress bar of commands that process many files."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class Bar:
    """Progress bar on a terminal; silent in a file or pipe, and outside of ``with``."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Bar:
        if self._bar.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, what: str, total: int | None) -> None:
        """Start a task of `total` steps."""
        self._bar.reset(self._task, description=what, total=total)

    def advance(self) -> None:
        """Complete a step."""
        self._bar.advance(self._task)
