"""``damex train`` and ``damex test``, with the arguments of mmdet's tools."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from damex.commandline.commands import test_parser, train_parser
from damex.engine.config_files import merge_options, read_config
from damex.errors import ConfigError


def train(arguments: Sequence[str]) -> None:
    """Train as mmdet's ``tools/train.py`` does, from command-line arguments."""
    args = train_parser().parse_args(arguments)
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
    """Evaluate as mmdet's ``tools/test.py`` does, from command-line arguments."""
    args = test_parser().parse_args(arguments)
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
    """Read the config and apply the command line; ConfigError if unreadable."""
    cfg = read_config(args.config)
    cfg.launcher = args.launcher
    merge_options(cfg, args.cfg_options or {})
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get("work_dir") is None:
        cfg.work_dir = str(Path("work_dirs") / Path(args.config).stem)
    return cfg


def build_runner(cfg: Config) -> Runner:
    """Build the runner of the config, MixtureRunner by default.

    mmengine's Runner would silently ignore the keys ``moe`` and ``mixture``.
    """
    import damex.registry  # noqa: F401

    cfg.setdefault("runner_type", "MixtureRunner")
    return RUNNERS.build(cfg)
