"""Exit of commands: a status, and one clear line for a mistake of the user."""

from __future__ import annotations

import inspect
import os
import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from damex.errors import ConfigError, DataError, did_you_mean

# Errors of libraries about invalid arguments.
REFUSALS = (
    *(ValueError, TypeError, LookupError, AssertionError, AttributeError),
    *(ArithmeticError, NotImplementedError),
)
LIBRARIES = frozenset({"torch", "mmengine", "mmcv", "mmdet", "timm", "damex"})
PLAIN = (bool, int, float, str, tuple)


def run_command(
    command: Callable[[Sequence[str]], int | None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a command; a mistake of the user prints its message, without a traceback.

    Returns the exit status: that of the command (0 for None), 2 for a mistake in a
    config or in the data, 130 for Ctrl-C.
    """
    try:
        status = command(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"\n{str(error) or 'interrupted'}\n")
        return 130
    except Exception as error:
        is_of_user = isinstance(error, (ConfigError, DataError))
        message = str(error) if is_of_user else fault_of_config(error)
        if message is None:
            raise
        rank = os.environ.get("RANK", "0")
        # A config is wrong on every process, a record or image possibly on one.
        if rank == "0" or isinstance(error, DataError):
            where = "" if "RANK" not in os.environ else f" (process {rank})"
            # A data loading worker passes its whole traceback as the message.
            message = re.split(r"damex\.errors\.(?:Config|Data)Error: ", message)[-1]
            sys.stderr.write(f"\nerror{where}: {message.strip()}\n")
        return 2
    return status or 0


def fault_of_config(error: Exception) -> str | None:
    """Explain an error of another library that a config caused, else return None.

    Covered are an unknown ``type``, a class that rejects its config, and a missing
    optional package; not, for instance, errors in a user's class.
    """
    if type(error) is ImportError and "pip install" in str(error):
        return " ".join(str(error).split())
    # Without mmengine imported, nothing was built yet.
    builders = sys.modules.get("mmengine.registry.build_functions")
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [] if builders is None else [builders.__file__]
    places = [i for i, one in enumerate(frames) if one.f_code.co_filename in files]
    if not places:
        return None
    values, inside = frames[places[-1]].f_locals, frames[places[-1] + 1 :]
    kind = values.get("obj_type", values.get("scheduler_type"))
    built = values.get("obj_cls", values.get("scheduler_cls"))
    if built is not None:
        return _fault_of_class(error, kind, built, values["args"], inside)
    registry = values["registry"]
    if isinstance(error, KeyError) and not inside and kind is not None:
        known = {*registry.module_dict, *getattr(registry.parent, "module_dict", ())}
        return (
            f"type={kind!r} is unknown, no {registry.name} of this name is registered; "
            f"{did_you_mean(str(kind), sorted(known))}"
        )
    if not inside and "args" not in values:
        given = reprlib.repr(values["cfg"])
        return f"a {registry.name} must be dict(type=..., ...), got {given}."
    return None


def _fault_of_class(
    error: Exception, kind: Any, built: Any, args: Mapping, inside: Sequence[FrameType]
) -> str | None:
    """Explain why a class rejects its config; `inside` are the frames below it."""
    classes = inspect.getmro(built) if inspect.isclass(built) else ()
    called = {built.__qualname__, *(f"{one.__qualname__}.__init__" for one in classes)}
    said = str(error) if isinstance(error, TypeError) else ""
    found = re.match(r"(\S+)\(\) got an unexpected keyword .* '(\w+)'", said)
    if found is not None and found[1] in called and found[2] in args:
        known = {key for one in classes for key in inspect.signature(one).parameters}
        return (
            f"dict(type={kind!r}, ...) has the unknown key {found[2]!r}; "
            f"{did_you_mean(found[2], sorted(known - {'args', 'kwargs'}))}"
        )
    if not inside:
        return f"dict(type={kind!r}, ...): {said}" if said else None
    packages = [str(one.f_globals.get("__name__")).partition(".")[0] for one in inside]
    # Bugs in damex or in a user's class keep their traceback.
    if packages[-1] == "damex" or not {*packages} <= LIBRARIES:
        return None
    if not isinstance(error, REFUSALS):
        return None
    given = [f"{key}={v!r}" for key, v in args.items() if isinstance(v, PLAIN)]
    call = f"dict({', '.join([f'type={kind!r}', *given, '...'])})"
    part = type(inside[-1].f_locals.get("self")).__name__
    where = "" if part in ("NoneType", built.__name__) else f" in its {part}"
    reason = " ".join(str(error).split())
    return f"{call} cannot be built: {type(error).__name__}{where}: {reason}"
