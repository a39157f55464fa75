"""Command line programs: types of options, and commands imported when they run."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter
from cyclopts.types import NonNegativeInt, PositiveInt
from cyclopts.validators import Number

from damex import __version__
from damex.errors import ConfigError

__all__ = ["NonNegativeInt", "Parameter", "PositiveInt"]

Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
Checkpoint = Annotated[str, Parameter(help="A .pth file of a training with damex.")]
ConfigName = Annotated[
    str, Parameter(help="A file, or the name of a config that comes with damex.")
]
ConfigOrFolder = Annotated[
    str,
    Parameter(help="A config: a file or a name; or the folder of a dataset."),
]
CfgOptions = Annotated[
    tuple[str, ...],
    Parameter(
        metavar="KEY=VALUE...",
        help="Settings that override those of the config; nested keys with dots, lists "
        "as key=[a,b] or key=a,b: moe=vanilla train_cfg.max_epochs=1.",
    ),
]
Seeds = Annotated[tuple[int, ...], Parameter(help="Of the trainings.")]
Jobs = Annotated[
    PositiveInt, Parameter(help="Trainings at a time; they share the cores.")
]


class Program(App):
    """App that raises ConfigError, in one line, for a mistake on the command line."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command of the given words."""
        try:
            return super().__call__(*args, **kwargs)
        except CycloptsError as error:
            words, app = [self.name[0], *(error.command_chain or ())], self
            for word in words[1:]:
                app = app[word]
            start = f'Command "{" ".join(words[1:])}" parameter '
            parts = [str(error).removeprefix(start)]
            if isinstance(error, MissingArgumentError) and app.help_epilogue:
                parts.append(f"Example: {app.help_epilogue.splitlines()[1].strip()}.")
            parts.append(f"See {' '.join(words)} --help.")
            raise ConfigError(" ".join(parts)) from error


def program(name: str, about: str, *examples: str) -> Program:
    """Return an app with help in plain text."""
    return Program(
        name,
        help=about,
        help_format="plaintext",
        help_epilogue=_epilogue(examples),
        version=f"damex {__version__}",
        default_parameter=Parameter(
            negative=(), consume_multiple=(1, None), show_default=_shown
        ),
        suppress_keyboard_interrupt=False,
        exit_on_error=False,
        print_error=False,
        verbose=False,
        result_action="return_value",
    )


def command(app: App, module: str, *examples: str) -> Callable[[Callable], Callable]:
    """Add a command: options, run by the function of the same name in `module`.

    The module is imported by a run only, as many take seconds; help and mistakes in
    options do not need it.
    """

    def register(options: Callable) -> Callable:
        @functools.wraps(options)
        def run(*args: Any, **kwargs: Any) -> int | None:
            if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
                print(f"damex {__version__}: loading ...", file=sys.stderr, flush=True)
            given = inspect.signature(options).bind(*args, **kwargs)
            given.apply_defaults()
            return getattr(import_module(module), options.__name__)(**given.arguments)

        # Help keeps line breaks: join the lines of an argument.
        run.__doc__ = re.sub(r"\n {8,}", " ", inspect.cleandoc(options.__doc__ or ""))
        place = len([*app])
        app.command(run, help_epilogue=_epilogue(examples), sort_key=place)
        return run

    return register


def _epilogue(examples: tuple[str, ...]) -> str:
    return "\n".join(["Examples:", *(f"  {line}" for line in examples)])


def _shown(default: Any) -> str | None:
    """A default as it is typed; None for flags and empty lists."""
    if default in (None, False, ()):
        return None
    return " ".join(map(str, default if isinstance(default, tuple) else (default,)))
