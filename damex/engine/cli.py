"""``damex train`` and ``damex test``, with the arguments of mmdet's tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from damex.config_files import config_of
from damex.errors import ConfigError


def train(
    config: str,
    *,
    amp: bool,
    auto_scale_lr: bool,
    resume: Sequence[str] | None,
    **run: Any,
) -> None:
    """Train as mmdet's ``tools/train.py`` does; options as in ``damex train``."""
    cfg = load_config(config, **run)
    if amp:
        if get_device() == "cpu":
            raise ConfigError("--amp needs a GPU, and none is seen here; leave it out.")
        cfg.optim_wrapper.type = "AmpOptimWrapper"
        cfg.optim_wrapper.setdefault("loss_scale", "dynamic")
    if auto_scale_lr:
        if "base_batch_size" not in (cfg.get("auto_scale_lr") or {}):
            raise ConfigError(
                "--auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...) in the "
                "config."
            )
        cfg.auto_scale_lr.enable = True
    if resume is not None:
        cfg.resume = True
        cfg.load_from = resume[0] if resume else None
    build_runner(cfg).train()


def test(
    config: str,
    checkpoint: str,
    *,
    out: str | None,
    show: bool,
    show_dir: str | None,
    wait_time: float,
    **run: Any,
) -> None:
    """Evaluate as mmdet's ``tools/test.py`` does; options as in ``damex test``."""
    if out and not out.endswith((".pkl", ".pickle")):
        raise ConfigError(f"--out must end in .pkl or .pickle, got {out!r}.")
    cfg = load_config(config, **run)
    cfg.load_from = checkpoint
    if show or show_dir:
        from mmdet.engine.hooks.utils import trigger_visualization_hook

        args = SimpleNamespace(show=show, show_dir=show_dir, wait_time=wait_time)
        cfg = trigger_visualization_hook(cfg, args)
    runner = build_runner(cfg)
    if out:
        from mmdet.evaluation import DumpDetResults

        runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=out))
    runner.test()


def load_config(
    config: str,
    *,
    cfg_options: Sequence[str] = (),
    work_dir: str | None = None,
    launcher: str = "none",
    local_rank: int = 0,  # mmengine reads it from the environment
) -> Config:
    """Read the config and apply the command line; ConfigError if unreadable."""
    cfg = config_of(config, [f"launcher={launcher}", *cfg_options])
    if work_dir is not None:
        cfg.work_dir = work_dir
    elif cfg.get("work_dir") is None:
        cfg.work_dir = str(Path("work_dirs") / Path(config).stem)
    return cfg


def build_runner(cfg: Config) -> Runner:
    """Build the runner of the config, MixtureRunner by default.

    mmengine's Runner would silently ignore the keys ``moe`` and ``mixture``.
    """
    import damex.registry  # noqa: F401

    cfg.setdefault("runner_type", "MixtureRunner")
    return RUNNERS.build(cfg)
