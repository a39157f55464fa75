"""The command behind ``tools/data.py``: what it can be asked, and what all read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType

from mmengine.config import Config

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
from damex.engine.config_files import config_of
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


def read_mixture(args: argparse.Namespace) -> Config:
    """The config of a command line, which needs no model here.

    Args:
        args: With ``config`` and ``cfg_options``.

    Raises:
        ConfigError: If the config cannot be read, or has no mixture.
    """
    cfg = config_of(args, needs_model=False)
    if cfg.get("mixture") is None:
        raise ConfigError(
            f"{args.config} sets no mixture=[dict(name=..., ...), ...]; see "
            "configs/own_datasets.py. A dataset without a config is checked by "
            "check --coco FILE --images DIR."
        )
    return cfg
