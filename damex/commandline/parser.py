"""The argument parser of all commands: one-line errors, examples below the options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from damex.errors import ConfigError

CFG_OPTIONS_HELP = (
    "override settings of the config: key=value pairs, nested keys with dots, lists as "
    "key=[a,b] or key=a,b, for instance moe=vanilla train_cfg.max_epochs=1"
)


class Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors, and examples below the options."""

    def __init__(
        self,
        command: str,
        description: str,
        *,
        examples: tuple[str, ...] = (),
        program: str = "damex",
    ) -> None:
        self._examples = examples
        lines = ["examples:", *(f"  {line}" for line in examples)]
        super().__init__(
            prog=f"{program} {command}",
            description=description,
            epilog="\n".join(lines) if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message of argparse."""
        is_short = "are required" in message and self._examples
        example = f", as in: {self._examples[0]}" if is_short else ""
        raise ConfigError(f"{message}{example}; see {self.prog} --help.")

    def add_checkpoint(self) -> None:
        """Add the checkpoint argument of a command without a config."""
        self.add_argument("checkpoint", help="a .pth file of a training with damex")

    def add_config(self, *, optional: bool = False, or_folder: bool = False) -> None:
        """Add the config, optional or the folder of a dataset, and its options."""
        also = ", or the folder of a dataset" if or_folder else ""
        self.add_argument(
            "config",
            nargs="?" if optional else None,
            help=f"a file, or the name of a config of damex{also}",
        )
        self.add_argument(
            "--cfg-options",
            nargs="+",
            action=Overrides,
            type=_key_value,
            help=CFG_OPTIONS_HELP,
        )
        self.set_defaults(option_words=())

    def add_runs(self, *, work_dir: str) -> None:
        """Add the arguments shared by commands with many runs."""
        self.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
        self.add_argument("--work-dir", default=work_dir)
        self.add_argument(
            "--jobs",
            type=at_least(1),
            default=1,
            help="trainings at a time; they share the cores",
        )


class Overrides(argparse.Action):
    """``key=value`` pairs as read by mmengine, imported only if there are any."""

    def __call__(self, parser: Any, namespace: Any, values: Any, *rest: Any) -> None:
        """Store them as a dict, and the words themselves as ``option_words``."""
        from mmengine.config import DictAction

        read = DictAction(self.option_strings, self.dest)
        for word in values:
            try:
                read(parser, namespace, [word], *rest)
            except (AssertionError, RecursionError) as error:
                raise argparse.ArgumentError(
                    self,
                    f"the brackets of {word!r} are not those of a list; write "
                    "key=[a,b] or key=(a,b), in quotes if the shell needs them",
                ) from error
        namespace.option_words = (*namespace.option_words, *values)


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for help."""
    return not {"-h", "--help"}.isdisjoint(arguments)


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse ``type`` for integers not below ``least``."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {text}")
        return int(text)

    return integer


def share(text: str) -> float:
    """Parse an argument that is a number in [0, 1]."""
    if not 0.0 <= float(text) <= 1.0:
        raise argparse.ArgumentTypeError(f"must be in [0, 1], got {text}")
    return float(text)


def _key_value(text: str) -> str:
    if not re.match(r"[^=]+=", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no key=value")
    if "dict(" in text:
        key = text.partition("=")[0]
        raise argparse.ArgumentTypeError(
            f"{text!r}: values are numbers, words and lists of them; write dicts into "
            f"a config file, or name a field of one, as in {key}.0.type=..."
        )
    return text
