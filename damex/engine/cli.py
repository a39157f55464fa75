"""The commands behind ``tools/``: arguments of mmdet, errors in one clear line."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from mmengine.config import Config, DictAction
from mmengine.device import get_device
from mmengine.registry import RUNNERS, build_functions
from mmengine.runner import Runner

from damex.engine.config_files import merge_options, read_config
from damex.errors import ConfigError, DataError, did_you_mean

CFG_OPTIONS_HELP = (
    "override settings of the config: key=value pairs, nested keys with dots, lists as "
    "key=[a,b] or key=a,b, for instance moe=vanilla train_cfg.max_epochs=1"
)


def train(arguments: Sequence[str]) -> None:
    """Train as ``tools/train.py`` does.

    Args:
        arguments: Command line without the program's name.
    """
    parser = _parser("Train a detector on a mixture of datasets")
    parser.add_argument("--amp", action="store_true", help="mixed-precision training")
    parser.add_argument(
        "--auto-scale-lr",
        action="store_true",
        help="scale the learning rate by the batch size of all processes",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        help="continue from a checkpoint; without a path from the last one of work-dir",
    )
    args = parser.parse_args(arguments)
    cfg = load_config(args)
    if args.amp:
        if get_device() == "cpu":
            raise ConfigError("--amp needs a GPU, and none is seen here; leave it out.")
        cfg.optim_wrapper.type = "AmpOptimWrapper"
        cfg.optim_wrapper.setdefault("loss_scale", "dynamic")
    if args.auto_scale_lr:
        if "base_batch_size" not in (cfg.get("auto_scale_lr") or {}):
            raise ConfigError(
                "--auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...) in the "
                "config."
            )
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == "auto" else args.resume
    build_runner(cfg).train()


def test(arguments: Sequence[str]) -> None:
    """Evaluate as ``tools/test.py`` does.

    Args:
        arguments: Command line without the program's name.
    """
    parser = _parser("Evaluate a checkpoint per dataset")
    parser.add_argument("checkpoint", help="a .pth file")
    parser.add_argument("--out", help="write all predictions to this pickle file")
    parser.add_argument("--show", action="store_true", help="show predictions")
    parser.add_argument("--show-dir", help="write painted images to this folder")
    parser.add_argument(
        "--wait-time", type=float, default=2, help="seconds per shown image"
    )
    args = parser.parse_args(arguments)
    if args.out and not args.out.endswith((".pkl", ".pickle")):
        raise ConfigError(f"--out must end in .pkl or .pickle, got {args.out!r}.")
    cfg = load_config(args)
    cfg.load_from = args.checkpoint
    if args.show or args.show_dir:
        from mmdet.engine.hooks.utils import trigger_visualization_hook

        cfg = trigger_visualization_hook(cfg, args)
    runner = build_runner(cfg)
    if args.out:
        from mmdet.evaluation import DumpDetResults

        runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=args.out))
    runner.test()


def load_config(args: argparse.Namespace) -> Config:
    """Read the config and apply what the command line says.

    Raises:
        ConfigError: If there is none, or it cannot be read.
    """
    cfg = read_config(args.config)
    cfg.launcher = args.launcher
    merge_options(cfg, args.cfg_options or {})
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get("work_dir") is None:
        cfg.work_dir = str(Path("work_dirs") / Path(args.config).stem)
    return cfg


def build_runner(cfg: Config) -> Runner:
    """Build the runner that the config asks for, MixtureRunner where it names none.

    mmengine's own would not know the keys ``moe`` and ``mixture``, and say nothing.
    """
    import damex.registry  # noqa: F401

    cfg.setdefault("runner_type", "MixtureRunner")
    return RUNNERS.build(cfg)


def run_command(
    command: Callable[[Sequence[str]], int | None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a command; a mistake of the user ends in its message, without a traceback.

    Args:
        command: Takes the command line without the program's name.
        arguments: Those; by default those of the process.

    Returns:
        The exit status: what the command returns, 0 where that is None, and 2 for a
        mistake in a config or in the data.
    """
    try:
        status = command(sys.argv[1:] if arguments is None else arguments)
    except Exception as error:
        is_of_user = isinstance(error, (ConfigError, DataError))
        message = str(error) if is_of_user else fault_of_config(error)
        if message is None:
            raise
        rank = os.environ.get("RANK", "0")
        # A config is wrong on every process, a record or image perhaps on one only.
        if rank == "0" or isinstance(error, DataError):
            where = "" if "RANK" not in os.environ else f" (process {rank})"
            # A data loading worker hands over its whole traceback as the message.
            message = re.split(r"damex\.errors\.(?:Config|Data)Error: ", message)[-1]
            sys.stderr.write(f"\nerror{where}: {message.strip()}\n")
        return 2
    return status or 0


def fault_of_config(error: Exception) -> str | None:
    """Say what in a config another library stumbled over.

    Args:
        error: With its traceback.

    Returns:
        A sentence if a ``type`` is unknown, a class does not take what its config says,
        or an optional package is missing; None for any other error, for instance in
        a class of the user's.
    """
    if type(error) is ImportError and "pip install" in str(error):
        return " ".join(str(error).split())
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    builds = [f for f in frames if f.f_code.co_filename == build_functions.__file__]
    if not builds:
        return None
    values = builds[-1].f_locals
    kind, built, args = values.get("obj_type"), values.get("obj_cls"), values["args"]
    if isinstance(error, KeyError) and frames[-1] is builds[-1] and built is None:
        registry = values["registry"]
        known = {*registry.module_dict, *getattr(registry.parent, "module_dict", ())}
        return (
            f"type={kind!r} is unknown, no {registry.name} of this name is registered; "
            f"{did_you_mean(str(kind), sorted(known))}"
        )
    if not isinstance(error, TypeError) or built is None:
        return None
    classes = inspect.getmro(built) if inspect.isclass(built) else ()
    called = {built.__qualname__, *(f"{one.__qualname__}.__init__" for one in classes)}
    found = re.match(r"(\S+)\(\) got an unexpected keyword .* '(\w+)'", str(error))
    if found is not None and found[1] in called and found[2] in args:
        known = {key for one in classes for key in inspect.signature(one).parameters}
        return (
            f"dict(type={kind!r}, ...) has the unknown key {found[2]!r}; "
            f"{did_you_mean(found[2], sorted(known - {'args', 'kwargs'}))}"
        )
    if frames[-1] is builds[-1]:
        return f"dict(type={kind!r}, ...): {error}"
    return None


class Parser(argparse.ArgumentParser):
    """Reports mistakes as all others are: in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below its usage."""
        raise ConfigError(f"{message}; see --help.")

    def add_config(self, *, optional: bool = False) -> None:
        """Add the config, which may be left out if ``optional``, and its options."""
        self.add_argument(
            "config",
            nargs="?" if optional else None,
            help="a file, or the name of a config of damex",
        )
        self.add_argument(
            "--cfg-options",
            nargs="+",
            action=DictAction,
            type=_key_value,
            help=CFG_OPTIONS_HELP,
        )


def at_least(least: int) -> Callable[[str], int]:
    """The ``type`` of an argument that is an integer not below ``least``."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {text}")
        return int(text)

    return integer


def _key_value(text: str) -> str:
    if not re.match(r"[^=]+=", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no key=value")
    return text


def _parser(description: str) -> Parser:
    """The arguments that training and testing share."""
    parser = Parser(description=description)
    parser.add_config()
    parser.add_argument("--work-dir", help="folder for logs and checkpoints")
    parser.add_argument(
        "--launcher",
        choices=["none", "pytorch", "slurm", "mpi"],
        default="none",
        help="how processes were started; torchrun is 'pytorch'",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    return parser
