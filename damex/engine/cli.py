"""The commands behind ``tools/``: arguments of mmdet, errors in one clear line."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.device import get_device
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from damex.errors import ConfigError, DataError

__all__ = [
    "build_runner",
    "load_config",
    "merge_options",
    "run_command",
    "test",
    "train",
]

CFG_OPTIONS_HELP = (
    "override settings of the config: key=value pairs, nested keys with dots, lists as "
    "key=[a,b] or key=a,b, for instance moe=None train_cfg.max_epochs=1"
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
    """Read the config file and apply what the command line says.

    Raises:
        ConfigError: If the file is missing.
    """
    path = Path(args.config)
    if not path.is_file():
        raise ConfigError(
            f"there is no config file {path} (seen from {Path.cwd()}); see configs/."
        )
    cfg = Config.fromfile(path)
    cfg.launcher = args.launcher
    if args.cfg_options is not None:
        merge_options(cfg, args.cfg_options)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get("work_dir") is None:
        cfg.work_dir = str(Path("work_dirs") / path.stem)
    return cfg


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Override settings of a config.

    A file behind ``moe`` is read first, so that ``moe.gate.k=2`` changes what it says.

    Args:
        cfg: Changed in place.
        options: Values by their names, nested ones with dots.

    Raises:
        ConfigError: If the file does not exist or sets no ``moe``, or a part of ``moe``
            is to be changed where there is none.
    """
    options = dict(options)
    inner = [name for name in options if name.startswith("moe.")]
    if inner and ("moe" in options or "moe" in cfg):
        import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
        from damex.engine.config import moe_of_file

        moe = options.pop("moe", cfg.get("moe"))
        cfg.moe = moe_of_file(moe) if isinstance(moe, str) else moe
        if cfg.moe is None:
            raise ConfigError(
                f"{inner[0]}={options[inner[0]]!r}: moe is None, a dense detector; add "
                "moe=configs/_base_/moe/damex.py, or leave it out."
            )
    cfg.merge_from_dict(options)


def build_runner(cfg: Config) -> Runner:
    """Build the runner that the config asks for, MixtureRunner where it names none.

    mmengine's own would not know the keys ``moe`` and ``mixture``, and say nothing.
    """
    import damex.registry  # noqa: F401

    cfg.setdefault("runner_type", "MixtureRunner")
    return RUNNERS.build(cfg)


def run_command(command: Callable[[Sequence[str]], None]) -> int:
    """Run a command; a mistake of the user ends in its message, without a traceback.

    Returns:
        The exit status: 0, or 2 for a mistake in a config or in the data.
    """
    try:
        command(sys.argv[1:])
    except (ConfigError, DataError) as error:
        rank = os.environ.get("RANK", "0")
        # A config is wrong on every process, a record or image perhaps on one only.
        if rank == "0" or isinstance(error, DataError):
            where = "" if "RANK" not in os.environ else f" (process {rank})"
            sys.stderr.write(f"\nerror{where}: {_message(error)}\n")
        return 2
    return 0


def _message(error: Exception) -> str:
    """The sentence of an error, without what registries and workers put around it."""
    text = str(error)
    # A data loading worker hands over its whole traceback as the message.
    text = re.split(r"damex\.errors\.(?:ConfigError|DataError): ", text)[-1]
    return re.sub(r"^(?:class `\w+` in \S+: )+", "", text).strip()


def _parser(description: str) -> argparse.ArgumentParser:
    """The arguments that training and testing share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("config", help="config file")
    parser.add_argument("--work-dir", help="folder for logs and checkpoints")
    parser.add_argument(
        "--cfg-options", nargs="+", action=DictAction, help=CFG_OPTIONS_HELP
    )
    parser.add_argument(
        "--launcher",
        choices=["none", "pytorch", "slurm", "mpi"],
        default="none",
        help="how processes were started; torchrun is 'pytorch'",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    return parser
