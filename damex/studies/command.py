"""The command behind ``tools/study.py``: run one study and write its report."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from damex.errors import ConfigError
from damex.studies.progress import StudyProgress
from damex.studies.report import markdown_report, write_report
from damex.studies.result import StudySettings

__all__ = ["STUDIES", "study"]

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
    module = import_module(f"damex.studies.{args.name}")
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
