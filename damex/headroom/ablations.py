"""Evaluate trained checkpoints without single FFNs, or with oracle routing.

Run as ``python -m damex.headroom.ablations NAME CONFIG CHECKPOINT``. ``ablate_ffns``
shows how much a dense detector depends on an FFN, not how much a better one would gain:
the layers around it were trained to expect it. ``oracle`` shows what experts
reach with perfect routing.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from mmcv.cnn.bricks.transformer import FFN
from mmengine.config import Config
from mmengine.runner import Runner
from rich.console import Console
from torch import nn

from damex.commandline.run import CfgOptions, ConfigName, program, run_command
from damex.engine.config import build_runner, load_config
from damex.engine.hooks import bare_model
from damex.engine.summary import score_table, scores_of, summarise
from damex.errors import ConfigError
from damex.files import write_json
from damex.headroom.report import SCORES, ladder_table, with_differences, zeroed_rows
from damex.models.sites import COMPONENTS

app = program(
    "python -m damex.headroom.ablations",
    "Evaluate trained checkpoints without single FFNs, or with oracle routing.",
    "python -m damex.headroom.ablations ablate_ffns my_mixture.py epoch_4.pth",
)
WorkDir = Annotated[str | None, Parameter(help="Folder for the log and summary.json.")]


@app.command(name="ablate_ffns")
def ablate_ffns(
    config: ConfigName,
    checkpoint: str,
    /,
    *,
    cfg_options: CfgOptions = (),
    work_dir: WorkDir = None,
) -> None:
    """Evaluate a dense detector without single FFNs."""
    cfg = load_config(config, cfg_options=cfg_options, work_dir=work_dir)
    runner = _runner(cfg, checkpoint)
    sites = ffn_sites(bare_model(runner))
    console = Console(file=sys.stdout, markup=False, emoji=False)
    number = len(sites) + 1
    console.print(f"1/{number}: all FFNs as they are", highlight=False)
    whole = summarise(scores_of(runner.val()))  # this loads the checkpoint
    rows = {}
    for place, (name, ffns) in enumerate(sites.items(), 2):
        console.print(f"{place}/{number}: {name} zeroed", highlight=False)
        with zeroed(ffns):
            rows[name] = summarise(scores_of(runner.val_loop.run()))
    kept = {name: {key: row[key] for key in SCORES} for name, row in rows.items()}
    summary = {**whole, "zeroed": kept}
    table = with_differences(zeroed_rows([summary]), base="none")
    text = ladder_table(table, kind="zeroed FFN")
    console.print(text, soft_wrap=True, highlight=False)
    _write(runner, summary, console)


@app.command(name="oracle")
def oracle(
    config: ConfigName,
    checkpoint: str,
    /,
    *,
    cfg_options: CfgOptions = (),
    work_dir: WorkDir = None,
) -> None:
    """Evaluate experts that are given the dataset of each image."""
    cfg = load_config(config, cfg_options=cfg_options, work_dir=work_dir)
    if not isinstance(cfg.get("moe"), Mapping):
        raise ConfigError(
            f"moe is {cfg.get('moe')!r} in the config, and oracle is for "
            "detectors with experts: name the config that the checkpoint was trained "
            "with."
        )
    cfg["moe"]["oracle"] = True
    runner = _runner(cfg, checkpoint)
    console = Console(file=sys.stdout, markup=False, emoji=False)
    scores = scores_of(runner.val())
    console.print(score_table(scores))
    _write(runner, summarise(scores), console)


def _runner(cfg: Config, checkpoint: str) -> Runner:
    """A runner that saves nothing; mmengine's save_best fails outside of a training."""
    cfg.load_from = checkpoint
    cfg.default_hooks = {**(cfg.get("default_hooks") or {}), "checkpoint": None}
    return build_runner(cfg)


def _write(runner: Runner, summary: Mapping[str, Any], console: Console) -> None:
    path = Path(runner.work_dir) / "summary.json"
    write_json(path, {**summary, "command": shlex.join(sys.argv)}, indent=2)
    console.print(f"written: {path}", soft_wrap=True, highlight=False)


def ffn_sites(detector: nn.Module) -> dict[str, list[FFN]]:
    """List FFNs by site: each layer (``encoder.0``), and each component as a whole.

    Raises:
        ConfigError: If there are none in encoder or decoder, or experts in their place.
    """
    sites: dict[str, list[FFN]] = {}
    for component in COMPONENTS:
        layers = getattr(getattr(detector, component, None), "layers", [])
        for number, layer in enumerate(layers):
            ffn = getattr(layer, "ffn", None)
            if not isinstance(ffn, FFN):
                raise ConfigError(
                    f"layer {number} of the {component} has a {type(ffn).__name__} in "
                    "the place of mmcv's FFN; ablate_ffns is for dense detectors."
                )
            sites[f"{component}.{number}"] = [ffn]
        if len(layers):
            sites[component] = [layer.ffn for layer in layers]
    if not sites:
        raise ConfigError(
            f"{type(detector).__name__} has no layers in an encoder or decoder whose "
            "FFNs could be zeroed."
        )
    return sites


@contextmanager
def zeroed(ffns: Iterable[FFN]) -> Iterator[None]:
    """Make FFNs contribute nothing to their residual stream; weights are untouched."""
    handles = [
        ffn.layers.register_forward_hook(lambda *call: torch.zeros_like(call[2]))
        for ffn in ffns
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    sys.exit(run_command(app))
