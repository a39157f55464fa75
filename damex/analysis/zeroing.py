"""The command ``python -m damex zero_ffns``: AP without the output of single FFNs.

It shows how much a trained detector depends on an FFN, not how much a better one would
win: layers around it were trained to expect it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from mmcv.cnn.bricks.transformer import FFN
from rich.console import Console
from torch import nn

from damex.analysis.ladder import SCORES, ladder_table, with_differences, zeroed_rows
from damex.engine.cli import Parser, build_runner, load_config
from damex.engine.schedule import bare_model
from damex.engine.summary import scores_of, summarise
from damex.errors import ConfigError

COMPONENTS = ("encoder", "decoder")


def zero_ffns(arguments: Sequence[str]) -> None:
    """Evaluate a checkpoint as it is, and again without each FFN.

    Args:
        arguments: Command line without the program's name.

    Raises:
        ConfigError: If the detector has no plain FFN in encoder or decoder.
    """
    parser = Parser(description="AP of a dense detector without single FFNs")
    parser.add_config()
    parser.add_argument("checkpoint", help="a .pth file of a dense detector")
    parser.add_argument("--work-dir", help="folder for the log and summary.json")
    parser.set_defaults(launcher="none")
    args = parser.parse_args(arguments)
    cfg = load_config(args)
    cfg.load_from = args.checkpoint
    # Nothing is saved, and mmengine's save_best fails outside of a training.
    cfg.default_hooks = {**(cfg.get("default_hooks") or {}), "checkpoint": None}
    runner = build_runner(cfg)
    sites = ffn_sites(bare_model(runner))
    console = Console(file=sys.stdout)
    number = len(sites) + 1
    console.print(f"1/{number}: all FFNs as they are", highlight=False)
    whole = summarise(scores_of(runner.val()))  # this loads the checkpoint
    rows = {}
    for place, (name, ffns) in enumerate(sites.items(), 2):
        console.print(f"{place}/{number}: {name} zeroed", highlight=False)
        with zeroed(ffns):
            rows[name] = summarise(scores_of(runner.val_loop.run()))
    kept = {name: {key: row[key] for key in SCORES} for name, row in rows.items()}
    summary = {**whole, "zeroed": kept, "command": shlex.join(sys.argv)}
    path = Path(cfg.work_dir) / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    table = with_differences(zeroed_rows([summary]), base="none")
    text = ladder_table(table, kind="zeroed FFN")
    console.print(text, soft_wrap=True, highlight=False)
    console.print(f"written: {path}", soft_wrap=True, highlight=False)


def ffn_sites(detector: nn.Module) -> dict[str, list[FFN]]:
    """The FFNs of each transformer layer, and of encoder and decoder as a whole.

    Args:
        detector: A built dense detector of mmdet's DETR family.

    Returns:
        ``encoder.0`` and so on with one FFN each, ``encoder``, ``decoder.0`` and so on,
        ``decoder``; without those of a component that has none.

    Raises:
        ConfigError: If there are none at all, or experts are in their place.
    """
    sites: dict[str, list[FFN]] = {}
    for component in COMPONENTS:
        layers = getattr(getattr(detector, component, None), "layers", [])
        for number, layer in enumerate(layers):
            ffn = getattr(layer, "ffn", None)
            if not isinstance(ffn, FFN):
                raise ConfigError(
                    f"layer {number} of the {component} has a {type(ffn).__name__} in "
                    "the place of mmcv's FFN; zero_ffns is for dense detectors."
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
    """Make FFNs add nothing to their input; no weight is touched.

    Args:
        ffns: Until the block ends, they return what comes in beside them: their
            identity, where they add it, else zeros.
    """
    handles = [
        ffn.layers.register_forward_hook(lambda *call: torch.zeros_like(call[2]))
        for ffn in ffns
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
