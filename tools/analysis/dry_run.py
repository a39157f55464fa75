"""Memory and traffic per process of a training, computed in one process.

Run as ``python tools/analysis/dry_run.py CONFIG --processes N``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from mmengine.structures import InstanceData
from torch import Tensor, distributed, nn

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
from damex.config_files import config_of
from damex.datasets.geometry import image_size_of
from damex.engine.config import check_detector, resolve_config
from damex.engine.console import filter_console
from damex.engine.optim import set_length
from damex.models.detectors import RoutedDetector
from damex.models.insertion import moe_blocks
from damex.moe import sharded_layers, sharded_names
from damex.workbench.cli.run import (
    CfgOptions,
    ConfigName,
    PositiveInt,
    program,
    run_command,
)

# Rows and their gradients go to the experts and back.
WAYS = 4
LISTED = 8  # numbers per row before they are abbreviated


@dataclass(frozen=True)
class Layout:
    """Memory, traffic and data of one process; equal for all processes.

    Attributes:
        processes: Number of processes.
        expert_parallel: Processes over which the experts of a layer are sharded.
        num_experts: Experts of a layer; 0 in a dense detector.
        parameters: Bytes of parameters and buffers.
        gradients: Bytes of gradients.
        optimizer: Bytes of the optimizer's state after a step.
        shape: Height and width of an image in pixels.
        batch_size: Images per process and step.
        sent_gradients: Bytes sent per step to average gradients.
        sent_tokens: Bytes sent per step to experts of other processes.
        batches: Per process and epoch.
        epochs: Of the training; None if its length is given by ``steps``.
        steps: Of the training.
    """

    processes: int
    expert_parallel: int
    num_experts: int
    parameters: int
    gradients: int
    optimizer: int
    shape: tuple[int, int]
    batch_size: int
    sent_gradients: float
    sent_tokens: float
    batches: int
    epochs: int | None
    steps: int


app = program(
    "python tools/analysis/dry_run.py",
    "What each process of a training would hold and send; nothing is started.",
    "python tools/analysis/dry_run.py quickstart --processes 8",
)


@app.default
def dry_run(
    config: ConfigName,
    /,
    *,
    cfg_options: CfgOptions = (),
    processes: PositiveInt = 1,
) -> None:
    """Print the layout of a training; see :func:`lay_out`."""
    filter_console(MMLogger.get_instance("dry_run"))
    print(describe(lay_out(config_of(config, cfg_options), processes=processes)))


def lay_out(cfg: Config, *, processes: int) -> Layout:
    """Build detector, optimizer and data as the first of several processes would.

    Raises:
        ConfigError: As the training, for instance if experts cannot be sharded.
    """
    cfg = resolve_config(cfg)
    init_default_scope(cfg.get("default_scope", "mmdet"))
    check_detector(cfg["model"])
    set_length(cfg)
    shape, train = image_size_of(cfg)[::-1], cfg["train_cfg"]
    with pretended_processes(processes):
        detector = MODELS.build(copy.deepcopy(cfg["model"]))  # mmdet writes into it
        loader = {**cfg["train_dataloader"], "num_workers": 0}
        data: Any = Runner.build_dataloader(
            {**loader, "persistent_workers": False}, seed=0
        )
        layers = sharded_layers(detector).values()
        size = max((layer.shards.size for layer in layers), default=1)
        held = _held_bytes(detector, cfg)
        gradients = _gradient_bytes(detector)
    batch_size = data.batch_sampler.batch_size
    sent = ring_bytes(gradients["dense"], processes)
    sent += ring_bytes(gradients["experts"], processes // size)
    exchanged = 0.0
    if size > 1:
        whole = copy.deepcopy(cfg["model"])
        whole["moe"]["expert_parallel"] = 1
        rows = routed_bytes(MODELS.build(whole), shape)
        exchanged = WAYS * rows * batch_size * (size - 1) / size
    epochs = train.get("max_epochs")
    return Layout(
        processes=processes,
        expert_parallel=size,
        num_experts=max((b.moe.num_experts for b in moe_blocks(detector)), default=0),
        gradients=sum(gradients.values()),
        **held,
        shape=shape,
        batch_size=batch_size,
        sent_gradients=sent,
        sent_tokens=exchanged,
        batches=len(data),
        epochs=epochs,
        steps=train["max_iters"] if epochs is None else epochs * len(data),
    )


@contextmanager
def pretended_processes(count: int) -> Iterator[None]:
    """Act as the first of `count` processes, with a fake backend that sends nothing."""
    if count == 1:
        yield
        return
    # Registers the backend, which torch does not expose.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def ring_bytes(size: int, processes: int) -> float:
    """Return the bytes sent by each process in a ring all-reduce of `size` bytes."""
    return 2 * size * (processes - 1) / processes


@torch.no_grad()
def routed_bytes(detector: nn.Module, shape: tuple[int, int]) -> float:
    """Return the bytes of rows routed to experts in a training step with one image.

    `detector` holds all of its experts and gets random weights; `shape` is height and
    width in pixels. The number of denoising queries does not grow with the boxes.
    """
    sent = []

    def note(layer: nn.Module, args: tuple[Tensor, ...], outputs: Any) -> None:
        routes = int(outputs[1].assignment.counts_E.sum())
        sent.append(routes * args[0].shape[-1] * args[0].element_size())

    for block in moe_blocks(detector):
        block.moe.register_forward_hook(note)
    generator = torch.Generator().manual_seed(0)
    for parameter in detector.parameters():  # avoids downloads
        parameter.normal_(std=0.02, generator=generator)
    detector.train()
    if isinstance(detector, RoutedDetector):
        detector.begin_step(iteration=0, max_iters=1)
    detector(torch.zeros(1, 3, *shape), [sample_of(shape)], mode="loss")
    return sum(sent)


def describe(layout: Layout) -> str:
    """Format the layout for the screen."""
    height, width = layout.shape
    total = layout.processes * layout.batch_size
    held = layout.parameters + layout.gradients + layout.optimizer
    rows = [*_places(layout)]
    rows.append(
        f"each process holds {_bytes(held)}: parameters {_bytes(layout.parameters)}, "
        f"gradients {_bytes(layout.gradients)}, optimizer {_bytes(layout.optimizer)}; "
        "activations come on top"
    )
    rows.append(
        f"and sends in a step ({layout.batch_size} images of {height} x {width}, "
        f"float32) gradients {_bytes(layout.sent_gradients)}, tokens "
        f"{_bytes(layout.sent_tokens)}"
    )
    length = "" if layout.epochs is None else f"{layout.epochs} epochs, "
    rows.append(
        f"a batch is {layout.processes} x {layout.batch_size} = {total} images, an "
        f"epoch {layout.batches:,} batches, the training {length}{layout.steps:,} steps"
    )
    return "\n".join(rows)


def _places(layout: Layout) -> Iterator[str]:
    """Lines that map experts to processes."""
    size = layout.expert_parallel
    lines = layout.processes // size
    kind = f"{layout.num_experts} experts" if layout.num_experts else "dense"
    yield f"{layout.processes} processes: {lines} x {size} (data x experts), {kind}"
    each = layout.num_experts // size
    for column in range(size if size > 1 else 0):
        ranks = _listed("process", range(column, layout.processes, size))
        experts = _listed("expert", range(column * each, (column + 1) * each))
        yield f"  {ranks}: {experts}"


def _listed(what: str, numbers: range) -> str:
    plural = "es" if what.endswith("s") else "s"
    names = [*map(str, numbers)]
    if len(names) > LISTED:
        names[3:-1] = ["..."]
    return f"{what}{plural * (len(numbers) > 1)} {', '.join(names)}"


def _gradient_bytes(detector: nn.Module) -> dict[str, int]:
    """Gradient bytes of sharded experts, and of all other parameters."""
    spread = set(sharded_names(detector))
    found = {"dense": 0, "experts": 0}
    for name, parameter in detector.named_parameters():
        if parameter.requires_grad:
            found["experts" if name in spread else "dense"] += parameter.nbytes
    return found


def _held_bytes(detector: nn.Module, cfg: Config) -> dict[str, int]:
    """Bytes of parameters, and of the optimizer after a step with zero gradients."""
    known = ("optimizer", "paramwise_cfg", "constructor")
    settings = {k: v for k, v in cfg["optim_wrapper"].items() if k in known}
    wrapper = build_optim_wrapper(detector, copy.deepcopy(settings))
    for parameter in detector.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    wrapper.optimizer.step()
    values = [v for state in wrapper.optimizer.state.values() for v in state.values()]
    tensors = [*detector.parameters(), *detector.buffers()]
    return dict(
        parameters=sum(tensor.nbytes for tensor in tensors),
        optimizer=sum(v.nbytes for v in values if isinstance(v, Tensor)),
    )


def sample_of(shape: tuple[int, int]) -> DetDataSample:
    """A data sample with one box, of the first dataset."""
    meta = dict(img_shape=shape, ori_shape=shape, batch_input_shape=shape)
    sample = DetDataSample(
        metainfo=dict(meta, scale_factor=(1.0, 1.0), group_id=0, dataset_id=0, img_id=0)
    )
    height, width = shape
    sample.gt_instances = InstanceData(
        bboxes=torch.tensor([[0.0, 0.0, width / 2, height / 2]]),
        labels=torch.zeros(1, dtype=torch.int64),
    )
    return sample


def _bytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


if __name__ == "__main__":
    sys.exit(run_command(app))
