"""The command ``damex``, also run by ``python -m damex`` and ``tools/*.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

from damex import __version__
from damex.commandline import commands
from damex.commandline.parser import asks_for_help
from damex.commandline.run import run_command
from damex.errors import ConfigError, did_you_mean


class Command(NamedTuple):
    """The module of a command, a function of the same name, and its description."""

    module: str
    about: str


COMMANDS = MappingProxyType(
    {
        "train": Command("damex.engine.cli", "train a detector on several datasets"),
        "test": Command("damex.engine.cli", "evaluate a checkpoint per dataset"),
        "predict": Command("damex.inference.commands", "detect objects in images"),
        "export": Command(
            "damex.inference.commands",
            "for mmdet or as ONNX: one dataset, or the whole mixture as ONNX",
        ),
        "experts": Command(
            "damex.inference.look.command", "which expert takes what, as a page"
        ),
        "grow": Command("damex.growth.commands", "put new datasets into a detector"),
        "prune": Command("damex.growth.commands", "take datasets away from it"),
        "merge": Command("damex.growth.commands", "let datasets share experts in it"),
        "data": Command("damex.commandline.data", "look at datasets before a training"),
        "doctor": Command("damex.doctor", "check the installation"),
        "headroom": Command("damex.headroom.command", "what experts could win"),
    }
)
EXAMPLES = """
examples:
  damex train quickstart
  damex predict work_dirs/quickstart/epoch_3.pth photos/ --draw seen
  damex data check configs/my_mixture.py
  damex COMMAND --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument and return the exit status.

    The status is 2 for a mistake in the command line, a config or the data. Help is
    printed without importing torch, which takes seconds.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if asks_for_help([name]):
        print(_help())
        return 0
    if name == "--version":
        print(f"damex {__version__}")
        return 0
    return run_command(partial(_run, name), rest)


def _run(name: str, arguments: Sequence[str]) -> int | None:
    """Run a command, or print its help."""
    if name not in COMMANDS:
        raise ConfigError(
            f"damex has no command {name!r}; {did_you_mean(name, COMMANDS)}"
        )
    if name != "data" and asks_for_help(arguments):  # data has subcommands
        getattr(commands, f"{name}_parser")().print_help()
        return None
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        # Imports take seconds. Not shown in files and pipes.
        print(f"damex {__version__}: loading ...", file=sys.stderr, flush=True)
    return getattr(import_module(COMMANDS[name].module), name)(arguments)


def _help() -> str:
    rows = [f"  {name:<13} {command.about}" for name, command in COMMANDS.items()]
    usage = "usage: damex COMMAND [--help] ...\n       damex --version\n\ncommands:"
    return "\n".join([usage, *rows, EXAMPLES])


if __name__ == "__main__":
    sys.exit(main())
