"""The command behind ``tools/study.py``: run one study and write its report.

What a person sees while a study runs: stage, steps and time left.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress, TimeRemainingColumn

from damex.errors import ConfigError
from studies.report import StudySettings, markdown_report, write_report

__all__ = ["STUDIES", "StudyProgress", "study"]

# Each is a module of this package with a function run(settings, progress).
STUDIES = ("chen2022", "pmoe2023", "softmax_gating2025", "deepmoe2019", "damex2023")


def study(arguments: Sequence[str]) -> None:
    """Run a study.

    Args:
        arguments: Command line without the program's name.

    Raises:
        ConfigError: If the number of seeds is out of range.
    """
    args = _parse(arguments)
    console = Console(file=sys.stdout)
    started = time.monotonic()
    module = import_module(f"studies.{args.name}.study")
    settings = StudySettings(quick=args.quick, seeds=args.seeds)
    result = module.run(settings, StudyProgress(console))
    run = dict(
        command="`" + shlex.join(["python", "tools/study.py", *arguments]) + "`",
        date=date.today().isoformat(),
        minutes=round((time.monotonic() - started) / 60, 1),
    )
    folder = Path(args.work_dir)
    paths = write_report(result, folder, args.name, run=run)
    console.print(Markdown(markdown_report(result, args.name, run=run)))
    for path in paths:
        console.print(f"written: {path}", soft_wrap=True, highlight=False)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Reproduce the experiments of a source paper"
    )
    parser.add_argument("name", choices=STUDIES, help="the study")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two minutes or less; shows that it works, not the paper's numbers",
    )
    parser.add_argument(
        "--seeds", type=int, help="number of seeds (default: the study's own)"
    )
    parser.add_argument("--work-dir", default="work_dirs/studies")
    args = parser.parse_args(arguments)
    if args.seeds is not None and args.seeds < 1:
        raise ConfigError(f"--seeds must be 1 or more, got {args.seeds}.")
    return args


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
