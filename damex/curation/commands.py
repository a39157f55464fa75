"""The command behind ``tools/data.py``: one entry for every question about data."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType

from damex.errors import ConfigError, did_you_mean

# Where a subcommand is: a function of its name that takes the command line after it.
COMMANDS = MappingProxyType[str, str](
    {
        "check": "damex.curation.check",
        "browse": "damex.curation.browse",
        "convert": "damex.curation.convert",
        "labels": "damex.curation.labels",
        "plan": "damex.curation.plan",
        "prepare": "damex.curation.prepare",
    }
)


def data(arguments: Sequence[str]) -> int | None:
    """Run a subcommand.

    Args:
        arguments: Its name, and the command line after it.

    Returns:
        The exit status where the subcommand has one of its own; None for success.

    Raises:
        ConfigError: If there is no such subcommand.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: tools/data.py {{{','.join(COMMANDS)}}} [--help] ...")
        return None
    if name not in COMMANDS:
        raise ConfigError(
            f"tools/data.py has no command {name!r}; {did_you_mean(name, COMMANDS)}"
        )
    return getattr(import_module(COMMANDS[name]), name)(rest)
