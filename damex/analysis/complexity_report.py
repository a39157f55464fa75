"""The command behind ``tools/complexity.py``: what a config costs beside dense."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdet.registry import MODELS
from mmengine.config import Config, DictAction
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from mmengine.utils import import_modules_from_strings
from rich.console import Console
from rich.table import Table
from torch import nn

from damex.analysis.complexity import PartComplexity, count_complexity
from damex.engine.cli import CFG_OPTIONS_HELP, merge_options
from damex.engine.resolve import resolve_config
from damex.engine.screen import quiet_screen
from damex.errors import ConfigError

__all__ = ["complexity"]


def complexity(arguments: Sequence[str]) -> None:
    """Print parameters and FLOPs per part, beside those of the dense detector.

    Args:
        arguments: Command line without the program's name.

    Raises:
        ConfigError: If the config is missing or names no image size.
    """
    args = _parse(arguments)
    cfg = Config.fromfile(args.config)
    merge_options(cfg, args.cfg_options or {})
    if cfg.get("custom_imports"):
        import_modules_from_strings(**cfg.custom_imports)
    init_default_scope(cfg.get("default_scope", "mmdet"))
    quiet_screen(MMLogger.get_instance("complexity"))
    height, width = args.shape or _test_shape(cfg)
    model = _resolved_model(cfg, classes=args.classes, groups=args.groups)
    size = dict(height=height, width=width)
    routed = count_complexity(_build(model), **size)
    without = {**model, "moe": None} if "moe" in model else model
    dense = count_complexity(_build(without), **size)
    Console().print(complexity_table(routed, dense, height=height, width=width))


def complexity_table(
    routed: Sequence[PartComplexity],
    dense: Sequence[PartComplexity],
    *,
    height: int,
    width: int,
) -> Table:
    """Two counts as a table for the screen.

    Args:
        routed: Parts of the detector of the config.
        dense: Parts of the same detector without experts.
        height: Height of the image in pixels.
        width: Width of the image.
    """
    table = Table(
        title=f"one image of {height} x {width} (height x width); "
        "a multiply-add is two FLOPs",
        title_justify="left",
    )
    table.add_column("part")
    for column in ("M parameters", "active", "dense", "GFLOPs", "dense", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    base = {part.name: part for part in dense}
    nothing = PartComplexity("", 0, 0, 0)
    for part in routed:
        table.add_row(*_cells(part, base.get(part.name, nothing)))
    table.add_section()
    table.add_row(*_cells(_total(routed), _total(dense)))
    return table


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Parameters and FLOPs of a config: total, active, and dense"
    )
    parser.add_argument("config", help="config file")
    parser.add_argument(
        "--shape",
        nargs=2,
        type=int,
        metavar=("HEIGHT", "WIDTH"),
        help="image size in pixels (default: that of Resize in test_pipeline)",
    )
    parser.add_argument(
        "--classes", type=int, help="number of classes, to count without the datasets"
    )
    parser.add_argument(
        "--groups", type=int, help="dataset groups, beside --classes (default: 2)"
    )
    parser.add_argument(
        "--cfg-options", nargs="+", action=DictAction, help=CFG_OPTIONS_HELP
    )
    args = parser.parse_args(arguments)
    if not Path(args.config).is_file():
        raise ConfigError(f"there is no config file {args.config}; see configs/.")
    for name in ("classes", "groups"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be 1 or more, got {value}.")
    if args.groups is not None and args.classes is None:
        raise ConfigError(
            "--groups is for a count without datasets and needs --classes; else the "
            "groups are those of the mixture."
        )
    if args.shape and min(args.shape) < 1:
        raise ConfigError(f"--shape must be positive, got {args.shape}.")
    return args


def _test_shape(cfg: Config) -> tuple[int, int]:
    """Height and width that the test pipeline resizes to."""
    for step in cfg.get("test_pipeline") or ():
        if step.get("type") == "Resize" and isinstance(step.get("scale"), Sequence):
            width, height = step["scale"]
            return int(height), int(width)
    raise ConfigError(
        "the config has no test_pipeline with Resize(scale=(width, height)); name the "
        "size with --shape HEIGHT WIDTH."
    )


def _resolved_model(
    cfg: Config, *, classes: int | None, groups: int | None
) -> dict[str, Any]:
    """The model's config, completed by the mixture or by the numbers given."""
    if classes is None:
        return dict(resolve_config(cfg)["model"])
    model = dict(resolve_config(Config({**cfg, "mixture": None}))["model"])
    model["bbox_head"] = {**model["bbox_head"], "num_classes": classes}
    if model.get("moe") is not None:
        model["num_groups"] = groups or 2
    return model


def _build(model: Mapping[str, Any]) -> nn.Module:
    """The detector with random weights: nothing is downloaded to count."""
    return MODELS.build(copy.deepcopy(dict(model)))  # mmdet writes into configs


def _total(parts: Sequence[PartComplexity]) -> PartComplexity:
    return PartComplexity(
        "total",
        sum(part.parameters for part in parts),
        sum(part.active_parameters for part in parts),
        sum(part.flops for part in parts),
    )


def _cells(part: PartComplexity, dense: PartComplexity) -> tuple[str, ...]:
    ratio = f"{part.flops / dense.flops:.3f}" if dense.flops else "-"
    return (
        part.name,
        f"{part.parameters / 1e6:.3f}",
        f"{part.active_parameters / 1e6:.3f}",
        f"{dense.parameters / 1e6:.3f}",
        f"{part.flops / 1e9:.3f}",
        f"{dense.flops / 1e9:.3f}",
        ratio,
    )
