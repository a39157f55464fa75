"""The bar of long work, for every command that looks at many files."""

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
    """A bar on the screen; nothing in a file or a pipe, or outside of ``with``."""

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
        """Show what begins, of so many steps."""
        self._bar.reset(self._task, description=what, total=total)

    def advance(self) -> None:
        """A step is done."""
        self._bar.advance(self._task)
