"""Command line programs: options, errors in one line, exit status."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, cast

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter
from cyclopts.validators import Number

from damex import __version__
from damex.datasets.entries import read_folders_once
from damex.errors import ConfigError, DataError, printable

# Errors of libraries about invalid arguments.
ERRORS_OF_ARGUMENTS = (
    *(ValueError, TypeError, LookupError, AssertionError, AttributeError),
    *(ArithmeticError, NotImplementedError),
)
LIBRARIES = frozenset({"torch", "mmengine", "mmcv", "mmdet", "timm", "damex"})
BUILDERS = "mmengine.registry.build_functions"

NonNegativeInt = Annotated[int, Parameter(validator=Number(gte=0))]
PositiveInt = Annotated[int, Parameter(validator=Number(gte=1))]
Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
Checkpoint = Annotated[
    str, Parameter(help="A .pth file of a training with damex, or a folder of a card.")
]
ConfigName = Annotated[
    str, Parameter(help="A file, or the name of a config that comes with damex.")
]
Device = Annotated[
    str | None,
    Parameter(
        metavar="cpu|cuda|cuda:N", help="Where to run (default: a GPU if available)."
    ),
]
Trust = Annotated[
    bool,
    Parameter(
        help="Allow everything that the config in the checkpoint names, and import its "
        "custom_imports: this can run code written by its author."
    ),
]
CfgOptions = Annotated[
    tuple[str, ...],
    Parameter(
        metavar="KEY=VALUE...",
        help="Settings that override those of the config; nested keys with dots, lists "
        "as key=[a,b] or key=a,b, texts as they are or in quotes: moe=vanilla "
        "train_cfg.max_epochs=1.",
    ),
]
Seeds = Annotated[tuple[int, ...], Parameter(help="Random seeds, one training each.")]
Jobs = Annotated[
    PositiveInt,
    Parameter(help="Trainings to run at a time; they share the cores and the GPU."),
]


class Program(App):
    """App that raises ConfigError, in one line, for a mistake on the command line."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command of the given words."""
        try:
            return super().__call__(*args, **kwargs)
        except CycloptsError as error:
            words, app = [self.name[0], *(error.command_chain or ())], cast(App, self)
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
    """Add a command: options, run by the function of the same name in a module.

    `module`, below damex.workbench, is imported by a run only, as many take seconds;
    help and mistakes in options do not need it. The function raises ConfigError or
    DataError for mistakes of the user, and returns the exit status, None for 0.
    """

    def register(options: Callable) -> Callable:
        @functools.wraps(options)
        def run(*args: Any, **kwargs: Any) -> int | None:
            if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
                print(f"damex {__version__}: loading ...", file=sys.stderr, flush=True)
            given = inspect.signature(options).bind(*args, **kwargs)
            given.apply_defaults()
            with read_folders_once():
                found = import_module(f"damex.workbench.{module}")
                return getattr(found, options.__name__)(**given.arguments)

        # Help keeps line breaks: join the lines of an argument.
        run.__doc__ = re.sub(r"\n {8,}", " ", inspect.cleandoc(options.__doc__ or ""))
        app.command(run, help_epilogue=_epilogue(examples), sort_key=len([*app]))
        return run

    return register


def _epilogue(examples: tuple[str, ...]) -> str:
    return "\n".join(["Examples:", *(f"  {line}" for line in examples)])


def _shown(default: Any) -> str | None:
    """A default as it is typed; None for flags and empty lists."""
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or None
    return None if default is None or default is False else str(default)


def run_command(
    command: Callable[[Sequence[str]], int | None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a command; a mistake of the user prints its message, without a traceback.

    Returns the exit status: that of the command (0 for None), 2 for a mistake in a
    config or in the data, 130 for Ctrl-C, 141 if the reader of the output ended first.
    """
    try:
        status = command(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as error:
        # Another Ctrl-C while the process ends would print a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"\n{str(error) or 'interrupted'}\n")
        return 130
    except Exception as error:
        is_of_user = isinstance(error, (ConfigError, DataError))
        message = str(error) if is_of_user else problem_of_config(error)
        if message is None:
            raise
        rank = os.environ.get("RANK", "0")
        # A config is wrong on every process, a record or image possibly on one.
        if rank == "0" or isinstance(error, DataError):
            where = "" if "RANK" not in os.environ else f" (process {rank})"
            # A data loading worker passes its whole traceback as the message.
            message = re.split(r"damex\.errors\.(?:Config|Data)Error: ", message)[-1]
            sys.stderr.write(f"\nerror{where}: {printable(message.strip())}\n")
        return 2
    return status or 0


def _is_output_closed() -> bool:
    """Whether the reader closed the output (``| head``); if so, discard the rest."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    is_closed = any(event & select.POLLERR for _, event in output.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed


def problem_of_config(error: Exception) -> str | None:
    """Return the last line of an error that a config caused, else None.

    These are missing optional packages, and errors of libraries while mmengine builds
    something; errors in damex or in a user's class keep their traceback.
    """
    text = " ".join(str(error.args[0] if error.args else error).split())
    if type(error) is ImportError and "pip install" in text:
        return text
    codes = [
        (str(frame.f_globals.get("__name__")), frame.f_code)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    places = [i for i, (module, _) in enumerate(codes) if module == BUILDERS]
    if not places or not isinstance(error, ERRORS_OF_ARGUMENTS):
        return None
    inside = codes[places[-1] + 1 :]  # below the class that could not be built
    packages = [module.partition(".")[0] for module, _ in inside]
    if not {*packages} <= LIBRARIES or packages[-1:] == ["damex"]:
        return None
    text = f"{type(error).__name__}: {text}"
    if inside:
        built = inside[0][1].co_qualname
        text = f"{built.removesuffix('.__init__')} cannot be built: {text}"
    return f"{text} (see the config)"
