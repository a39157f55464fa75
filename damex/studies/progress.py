"""What a person sees while a study runs: stage, steps and time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

__all__ = ["StudyProgress"]

Item = TypeVar("Item")


class StudyProgress:
    """A bar on a terminal; a plain line now and then in a pipe or a file.

    Args:
        console: Where to write.
        every_seconds: Seconds between plain lines.
        clock: Seconds since some moment.
    """

    def __init__(
        self,
        console: Console,
        *,
        every_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._every_seconds = every_seconds
        self._clock = clock

    def track(
        self, items: Iterable[Item], label: str, *, total: int | None = None
    ) -> Iterator[Item]:
        """Hand on the items and show how far they are.

        Args:
            items: What is worked through.
            label: What is done with them.
            total: Their number; ``len(items)`` by default.
        """
        if total is None and isinstance(items, Sized):
            total = len(items)
        if self._console.is_terminal:
            yield from self._bar(items, label, total)
        else:
            yield from self._lines(items, label, total)

    def _bar(
        self, items: Iterable[Item], label: str, total: int | None
    ) -> Iterator[Item]:
        columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(label, total=total)
            for item in items:
                yield item
                progress.advance(task)

    def _lines(
        self, items: Iterable[Item], label: str, total: int | None
    ) -> Iterator[Item]:
        started = last = self._clock()
        for done, item in enumerate(items, 1):
            yield item
            now = self._clock()
            if now - last < self._every_seconds and done != total:
                continue
            last = now
            left = "" if total is None else f"/{total}"
            if total is not None:
                seconds = (now - started) / done * (total - done)
                left += f", {seconds:.0f} s left"
            self._console.print(f"  {label}: {done}{left}", highlight=False)
