"""One way to run a study: the command, the jobs seed by seed, and their progress."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Literal, TypeVar

import torch
from rich import progress
from rich.console import Console
from rich.markdown import Markdown

from damex.workbench.cli.run import PositiveInt, program
from studies.report import markdown_report, write_report

# Each is a folder in studies/ whose study.py has a function run(session).
Study = Literal[
    "chen2022",
    "pmoe2023",
    "softmax_gating2025",
    "deepmoe2019",
    "damex2023",
    "missing_labels",
]

Item = TypeVar("Item")
Case = TypeVar("Case", bound=Hashable)
Outcome = TypeVar("Outcome")

app = program(
    "python tools/study.py",
    "Reproduce the experiments of a source paper.",
    "python tools/study.py chen2022 --quick",
)


@dataclass(frozen=True)
class Session:
    """How much of a study to run, and where its progress is shown.

    Attributes:
        quick: Small data and few steps: two minutes or less on two cores, to test the
            code; its numbers are not compared with the paper's.
        seeds: Number of seeds; None for the default of the study.
        console: For progress; silent by default.
    """

    quick: bool = False
    seeds: int | None = None
    console: Console = field(default_factory=partial(Console, quiet=True))

    def seed_range(self, default: int) -> range:
        """The seeds to run, by default as many as the study needs."""
        return range(self.seeds or default)

    def track(self, items: Iterable[Item], label: str) -> Iterable[Item]:
        """Yield the items, and show how many are done."""
        return progress.track(items, label, console=self.console)

    def run(
        self,
        jobs: Collection[tuple[Case, int]],
        measure: Callable[[Case, int], Outcome],
        label: str,
    ) -> dict[Case, list[Outcome]]:
        """Measure all jobs in order; returns the outcomes of each case's seeds."""
        found: dict[Case, list[Outcome]] = {}
        for case, seed in self.track(jobs, label):
            found.setdefault(case, []).append(measure(case, seed))
        return found


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generator of torch; its state is restored on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@app.default
def study(
    name: Study,
    /,
    *,
    quick: bool = False,
    seeds: PositiveInt | None = None,
    work_dir: Path = Path("work_dirs/studies"),
) -> None:
    """Run a study and write its report.

    Args:
        name: The study.
        quick: Two minutes or less; tests the code, not the paper's numbers.
        seeds: Number of seeds (default: as many as the study needs).
        work_dir: Output folder.
    """
    console = Console(file=sys.stdout)
    started = time.monotonic()
    module = import_module(f"studies.{name}.study")
    result = module.run(Session(quick, seeds, console))
    run = dict(
        command="`" + shlex.join(["python", "tools/study.py", *sys.argv[1:]]) + "`",
        date=date.today().isoformat(),
        minutes=round((time.monotonic() - started) / 60, 1),
    )
    paths = write_report(result, work_dir, name, run=run)
    console.print(Markdown(markdown_report(result, name, run=run)))
    for path in paths:
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
