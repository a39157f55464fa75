"""Parameters and FLOPs of a detector: total, and active per image or token.

Run as ``python tools/analysis/complexity.py CONFIG``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
from damex.config_files import config_of
from damex.datasets.geometry import image_size_of, set_image_size
from damex.engine.config import DATASET_OPTIONS, check_detector, resolve_config
from damex.engine.console import filter_console
from damex.errors import ConfigError
from damex.moe import Assignment, MoELayer
from damex.workbench.cli.run import (
    CfgOptions,
    ConfigName,
    PositiveInt,
    program,
    run_command,
)


@dataclass(frozen=True)
class PartComplexity:
    """Size and cost of one part of a detector.

    Attributes:
        name: Attribute of the detector, for instance ``decoder``.
        parameters: All parameters.
        active_parameters: Those used for an average token: k/E of a bank of E experts
            if a token goes to k of them.
        flops: Floating-point operations per image, a multiply-add counted as two.
    """

    name: str
    parameters: int
    active_parameters: int
    flops: int


@torch.no_grad()
def count_complexity(
    detector: nn.Module, *, height: int, width: int, seed: int = 0
) -> list[PartComplexity]:
    """Count parameters and FLOPs for one image of noise (height and width in pixels).

    Matrix products, convolutions and attention are counted as executed: an expert
    without tokens and a closed channel cost nothing. Element-wise operations and the
    sampling of deformable attention, equal with and without experts, are not counted.

    Returns:
        One entry per child module with parameters, in order, and ``other`` for
        parameters of the detector itself.
    """
    was_training = detector.training
    detector.eval()
    shares: dict[int, float] = {}
    handles = [
        module.gate.register_forward_hook(_note_share(shares, module))
        for module in detector.modules()
        if isinstance(module, MoELayer)
    ]
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            detector(*_noise(detector, height, width, seed), mode="predict")
    finally:
        for handle in handles:
            handle.remove()
        detector.train(was_training)
    # Keyed by path; "Detector.child" includes all submodules.
    flops = {
        path.partition(".")[2]: sum(operations.values())
        for path, operations in counter.get_flop_counts().items()
    }
    parts = [
        PartComplexity(
            name=name,
            parameters=_count(part),
            active_parameters=_count(part) - _idle(part, shares),
            flops=flops.get(name, 0),
        )
        for name, part in detector.named_children()
        if _count(part)
    ]
    own = sum(p.numel() for p in detector.parameters(recurse=False))
    return [*parts, PartComplexity("other", own, own, 0)]


def _noise(
    detector: nn.Module, height: int, width: int, seed: int
) -> tuple[Tensor, list[DetDataSample]]:
    """An image and its data sample, as the data preprocessor returns them."""
    device = next(detector.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(1, 3, height, width, generator=generator).to(device)
    shape = (height, width)
    meta = dict(img_shape=shape, ori_shape=shape, batch_input_shape=shape)
    return image, [DetDataSample(metainfo={**meta, "scale_factor": (1.0, 1.0)})]


def _note_share(shares: dict[int, float], layer: MoELayer) -> Any:
    """A gate hook that records the fraction of experts used per token."""

    def hook(gate: nn.Module, inputs: tuple[Any, ...], assignment: Assignment) -> None:
        routes = int(assignment.counts_E.sum())
        share = routes / max(assignment.num_tokens, 1) / layer.num_experts
        shares[id(layer)] = min(share, 1.0)

    return hook


def _idle(part: nn.Module, shares: Mapping[int, float]) -> int:
    """Expert parameters that an average token does not use."""
    return sum(
        round(_count(layer.experts) * (1.0 - shares.get(id(layer), 1.0)))
        for layer in part.modules()
        if isinstance(layer, MoELayer) and isinstance(layer.experts, nn.Module)
    )


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


app = program(
    "python tools/analysis/complexity.py",
    "Parameters and FLOPs of a config: total, active, and dense.",
    "python tools/analysis/complexity.py quickstart --classes 24 --groups 5",
)


@app.default
def complexity(
    config: ConfigName,
    /,
    *,
    cfg_options: CfgOptions = (),
    shape: Annotated[
        tuple[PositiveInt, PositiveInt] | None, Parameter(metavar="HEIGHT WIDTH")
    ] = None,
    classes: PositiveInt | None = None,
    groups: PositiveInt | None = None,
) -> None:
    """Print parameters and FLOPs per part, compared with the dense detector.

    Args:
        config: A file, or the name of a config of damex.
        cfg_options: Overrides of its settings.
        shape: Image size in pixels (default: that of Resize in test_pipeline).
        classes: Number of classes, to count without the datasets.
        groups: Number of dataset groups, with --classes (default: 2).
    """
    if groups is not None and classes is None:
        raise ConfigError(
            "--groups is for a count without datasets and needs --classes; else the "
            "groups are those of the mixture."
        )
    cfg = config_of(config, cfg_options)
    init_default_scope(cfg.get("default_scope", "mmdet"))
    filter_console(MMLogger.get_instance("complexity"))
    set_image_size(cfg)
    height, width = shape or image_size_of(cfg)[::-1]
    model = _resolved_model(cfg, classes=classes, groups=groups)
    size = dict(height=height, width=width)
    without = {**model, "moe": None} if "moe" in model else model
    routed, dense = (  # with random weights; mmdet writes into configs
        count_complexity(MODELS.build(copy.deepcopy(one)), **size)
        for one in (model, without)
    )
    Console().print(complexity_table(routed, dense, height=height, width=width))


def complexity_table(
    routed: Sequence[PartComplexity],
    dense: Sequence[PartComplexity],
    *,
    height: int,
    width: int,
) -> Table:
    """Return counts of a detector, and of the same without experts, for the screen."""
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


def _resolved_model(
    cfg: Config, *, classes: int | None, groups: int | None
) -> dict[str, Any]:
    """The model config, completed by the mixture or by the given numbers."""
    without_data = {"mixture": None, "image_size": None}  # the size is set already
    known = cfg if classes is None else Config({**cfg, **without_data})
    model = dict(resolve_config(known)["model"])
    check_detector(model)
    if isinstance(model.get("moe"), Mapping):
        # Count the final experts in one process; the noise has no dataset.
        left_out = ("upcycling", "oracle", "expert_parallel")
        model["moe"] = {k: v for k, v in model["moe"].items() if k not in left_out}
    if classes is None:
        return model
    model["bbox_head"] = {**model["bbox_head"], "num_classes": classes}
    number = groups or 2
    if model.get("moe") is not None:
        model["num_groups"] = number
    if any(model.get(name) not in (None, False) for name in DATASET_OPTIONS):
        labels = [range(classes)] * number
        model["label_coverage"] = dict(labels=labels, groups=range(number))
    return model


def _total(parts: Sequence[PartComplexity]) -> PartComplexity:
    columns = zip(*(astuple(part)[1:] for part in parts), strict=True)
    return PartComplexity("total", *map(sum, columns))


def _cells(part: PartComplexity, dense: PartComplexity) -> tuple[str, ...]:
    millions = part.parameters, part.active_parameters, dense.parameters
    return (
        part.name,
        *(f"{count / 1e6:.3f}" for count in millions),
        *(f"{flops / 1e9:.3f}" for flops in (part.flops, dense.flops)),
        f"{part.flops / dense.flops:.3f}" if dense.flops else "-",
    )


if __name__ == "__main__":
    sys.exit(run_command(app))
