"""One way to run a study: the command, the jobs seed by seed, and their progress."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import torch
from rich import progress
from rich.console import Console
from rich.markdown import Markdown

from damex.errors import ConfigError
from studies.report import markdown_report, write_report

__all__ = ["STUDIES", "Session", "seeded", "study", "track"]

# Each is a folder beside this file whose study.py has a function run(session).
STUDIES = (
    "chen2022",
    "pmoe2023",
    "softmax_gating2025",
    "deepmoe2019",
    "damex2023",
    "missing_labels",
)
EVERY_SECONDS = 15.0  # between two lines of progress in a pipe or a file

Item = TypeVar("Item")
Case = TypeVar("Case", bound=Hashable)
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Session:
    """How much of a study to run, and where its progress is shown.

    Attributes:
        quick: Small data and few steps: two minutes or less on two cores, to see that
            everything works; its numbers are not compared with the paper's.
        seeds: Number of seeds; None for the study's own number.
        console: For progress; silent by default.
    """

    quick: bool = False
    seeds: int | None = None
    console: Console = field(default_factory=partial(Console, quiet=True))

    def seed_range(self, default: int) -> range:
        """The seeds to run.

        Args:
            default: The study's own number.
        """
        return range(self.seeds or default)

    def run(
        self,
        jobs: Collection[tuple[Case, int]],
        measure: Callable[[Case, int], Outcome],
        label: str,
    ) -> dict[Case, list[Outcome]]:
        """Measures every case with every one of its seeds.

        Args:
            jobs: Cases and seeds, in the order in which they are run.
            measure: One case with one seed.
            label: What is done, for the progress.

        Returns:
            For each case, in the order of its first job, the outcomes of its seeds.
        """
        found: dict[Case, list[Outcome]] = {}
        for case, seed in track(jobs, label, self.console):
            found.setdefault(case, []).append(measure(case, seed))
        return found


def track(
    items: Collection[Item],
    label: str,
    console: Console,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Item]:
    """Hands on the items: a bar on a terminal, a plain line now and then elsewhere.

    Args:
        items: What is worked through.
        label: What is done with them.
        console: Where to write.
        clock: Seconds since some moment.
    """
    if console.is_terminal:
        yield from progress.track(items, label, console=console)
        return
    started = last = clock()
    for done, item in enumerate(items, 1):
        yield item
        now = clock()
        if now - last >= EVERY_SECONDS or done == len(items):
            last = now
            left = (now - started) / done * (len(items) - done)
            text = f"  {label}: {done}/{len(items)}, {left:.0f} s left"
            console.print(text, highlight=False)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generator starts at a seed inside, and goes on as before outside.

    Args:
        seed: Of what is drawn inside.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def study(arguments: Sequence[str]) -> None:
    """The command behind ``tools/study.py``: runs one study and writes its report.

    Args:
        arguments: Command line without the program's name.

    Raises:
        ConfigError: If the number of seeds is out of range.
    """
    args = _parse(arguments)
    console = Console(file=sys.stdout)
    started = time.monotonic()
    module = import_module(f"studies.{args.name}.study")
    result = module.run(Session(args.quick, args.seeds, console))
    run = dict(
        command="`" + shlex.join(["python", "tools/study.py", *arguments]) + "`",
        date=date.today().isoformat(),
        minutes=round((time.monotonic() - started) / 60, 1),
    )
    paths = write_report(result, Path(args.work_dir), args.name, run=run)
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
