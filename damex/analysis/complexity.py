"""Parameters and FLOPs of a detector: total, and active for one image or token."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from damex.commandline.measuring import complexity_parser
from damex.engine.config import DATASET_OPTIONS, resolve_config
from damex.engine.config_files import config_of
from damex.engine.console import filter_console
from damex.engine.runner import check_detector
from damex.errors import ConfigError
from damex.moe import Assignment, MoELayer


@dataclass(frozen=True)
class PartComplexity:
    """What one part of a detector holds and computes.

    Attributes:
        name: Attribute of the detector, for instance ``decoder``.
        parameters: All parameters.
        active_parameters: Those that an average token meets: of a bank of E experts
            the share k/E if a token goes to k of them.
        flops: Floating-point operations for one image, a multiply-add counted as two.
    """

    name: str
    parameters: int
    active_parameters: int
    flops: int


@torch.no_grad()
def count_complexity(
    detector: nn.Module, *, height: int, width: int, seed: int = 0
) -> list[PartComplexity]:
    """Run one image of noise through the detector and count.

    Counted are matrix products, convolutions and attention, as they are executed: an
    expert that gets no token and a channel that is closed cost nothing. Not counted
    are element-wise operations and the sampling of deformable attention, which are
    the same with and without experts.

    Args:
        detector: A built detector; left in the mode (training or not) it was in.
        height: Height of the image in pixels.
        width: Width of the image.
        seed: Seed of the noise.

    Returns:
        One entry for each child module that holds parameters, in their order, and
        ``other`` for parameters of the detector itself.
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
    # Keyed by path; "Detector.child" is a child with all that is in it.
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
    """An image as the data preprocessor hands it on, and its data sample."""
    device = next(detector.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(1, 3, height, width, generator=generator).to(device)
    shape = (height, width)
    meta = dict(img_shape=shape, ori_shape=shape, batch_input_shape=shape)
    return image, [DetDataSample(metainfo={**meta, "scale_factor": (1.0, 1.0)})]


def _note_share(shares: dict[int, float], layer: MoELayer) -> Any:
    """A hook for a gate: keeps the share of the experts that a token of it meets."""

    def hook(gate: nn.Module, inputs: tuple[Any, ...], assignment: Assignment) -> None:
        routes = int(assignment.counts_E.sum())
        share = routes / max(assignment.num_tokens, 1) / layer.num_experts
        shares[id(layer)] = min(share, 1.0)

    return hook


def _idle(part: nn.Module, shares: Mapping[int, float]) -> int:
    """Parameters of experts that an average token of this part does not meet."""
    return sum(
        round(_count(layer.experts) * (1.0 - shares.get(id(layer), 1.0)))
        for layer in part.modules()
        if isinstance(layer, MoELayer) and isinstance(layer.experts, nn.Module)
    )


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def complexity(arguments: Sequence[str]) -> None:
    """Print parameters and FLOPs per part, beside those of the dense detector.

    Args:
        arguments: Command line without the program's name.

    Raises:
        ConfigError: If the config is missing or names no image size.
    """
    args = complexity_parser().parse_args(arguments)
    if args.groups is not None and args.classes is None:
        raise ConfigError(
            "--groups is for a count without datasets and needs --classes; else the "
            "groups are those of the mixture."
        )
    cfg = config_of(args)
    init_default_scope(cfg.get("default_scope", "mmdet"))
    filter_console(MMLogger.get_instance("complexity"))
    height, width = args.shape or size_of_test_images(cfg)
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
    """Counts of a detector, and of the same without experts, for the screen."""
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


def size_of_test_images(cfg: Config) -> tuple[int, int]:
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
    known = cfg if classes is None else Config({**cfg, "mixture": None})
    model = dict(resolve_config(known)["model"])
    check_detector(model)
    if isinstance(model.get("moe"), Mapping):
        # What runs after a dense phase, and in one process; and an image of noise is of
        # no dataset.
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


def _build(model: Mapping[str, Any]) -> nn.Module:
    """The detector with random weights: nothing is downloaded to count."""
    return MODELS.build(copy.deepcopy(dict(model)))  # mmdet writes into configs


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
