"""The cost of experts in a detector: its step relative to a detector without experts.

Run as ``python -m tools.analysis.step_cost CONFIG``. The detectors take turns in one
process, and the ratio of their medians counts. For a detector of Transformers it is the
ratio to the plain model of Transformers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from mmdet.registry import MODELS
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from torch import Tensor, nn

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
from damex.config_files import config_of
from damex.engine.config import resolve_config
from damex.engine.console import filter_console
from damex.engine.summary import markdown
from damex.workbench.cli.run import (
    CfgOptions,
    ConfigName,
    PositiveInt,
    program,
    run_command,
)
from tools.analysis.benchmark import hardware, medians_in_turns, saved_bytes
from tools.analysis.dry_run import sample_of

app = program(
    "python -m tools.analysis.step_cost",
    "Time the step of a detector with and without its experts.",
    "python -m tools.analysis.step_cost quickstart --image-size 128",
)


@app.default
def step_cost(
    config: ConfigName,
    /,
    *,
    cfg_options: CfgOptions = (),
    image_size: PositiveInt = 640,
    batch_size: PositiveInt = 2,
    rounds: PositiveInt = 11,
    threads: PositiveInt = 1,
) -> None:
    """Print the time and memory of a step on the CPU; weights are random.

    Args:
        config: With experts, in ``moe`` or ``model.moe``.
        cfg_options: Settings that change the config.
        image_size: Height and width of the images in pixels.
        batch_size: Images of a step.
        rounds: Measurements of each detector.
        threads: Of torch.
    """
    filter_console(MMLogger.get_instance("step_cost"))
    torch.set_num_threads(threads)
    model = resolve_config(config_of(config, cfg_options))["model"]
    init_default_scope("mmdet")
    images = torch.rand(batch_size, 3, image_size, image_size) * 255
    rivals = dict(detectors_of(model, images))
    rows = [[name, *row] for name, row in measure(rivals, rounds).items()]
    print(
        f"{config}: {batch_size} images of {image_size} x {image_size}, "
        f"{threads} threads, {hardware('cpu')}, torch {torch.__version__}; "
        f"medians of {rounds} rounds\n"
    )
    head = ("detector", "parameters", "training step", "prediction", "MiB it keeps")
    print(markdown([*head], rows))


def detectors_of(
    model: Mapping[str, Any], images: Tensor
) -> Iterator[tuple[str, tuple[nn.Module, Callable[[bool], Any]]]]:
    """Yield name, module and step of the detectors, the one to compare with first.

    A step takes whether it trains, and returns a loss if so.
    """
    for name, moe in (("without experts", None), ("with experts", model["moe"])):
        torch.manual_seed(0)
        detector = MODELS.build(copy.deepcopy({**model, "moe": moe}))
        detector.init_weights()
        samples = [sample_of((images.shape[2], images.shape[3])) for _ in images]
        if name == "without experts" and hasattr(detector, "detr"):
            yield "plain Transformers", (detector.detr, _plain(detector, images))
        yield name, (detector, _step(detector, images, samples))


def measure(
    rivals: Mapping[str, tuple[nn.Module, Callable[[bool], Any]]], rounds: int
) -> dict[str, list[str]]:
    """Return the cells of each detector; ratios are to the first one."""
    found = {name: [_millions(module)] for name, (module, _) in rivals.items()}
    for training in (True, False):
        steps = [_timed(module, step, training) for module, step in rivals.values()]
        seconds = medians_in_turns(steps, rounds, "cpu")
        for cells, taken in zip(found.values(), seconds, strict=True):
            cells.append(f"{1000 * taken:.0f} ms ({taken / seconds[0]:.3f})")
    for cells, (module, step) in zip(found.values(), rivals.values(), strict=True):
        kept = saved_bytes(_timed(module, step, True), module)
        cells.append(f"{kept / 2**20:.0f}")
    return found


def _timed(
    module: nn.Module, step: Callable[[bool], Any], training: bool
) -> Callable[[], None]:
    def run() -> None:
        module.train(training)
        module.zero_grad()
        with torch.set_grad_enabled(training):
            loss = step(training)
        if training:
            loss.backward()

    return run


def _step(detector: Any, images: Tensor, samples: list) -> Callable[[bool], Any]:
    """A step of a detector of a mixture, without reading and normalizing images."""
    data = dict(inputs=[*images.byte()], data_samples=samples)
    data = detector.data_preprocessor(data)

    def step(training: bool) -> Any:
        detector.begin_step(iteration=0, max_iters=100)
        found = detector(**data, mode="loss" if training else "predict")
        return detector.parse_losses(found)[0] if training else None

    return step


def _plain(detector: Any, images: Tensor) -> Callable[[bool], Any]:
    """The same step of the model of Transformers by itself."""
    quarter = torch.tensor([[0.25, 0.25, 0.5, 0.5]])  # the box of a sample
    labels = [dict(class_labels=torch.tensor([0]), boxes=quarter) for _ in images]

    def step(training: bool) -> Any:
        found = detector.detr(images / 255, labels=labels if training else None)
        return found.loss

    return step


def _millions(module: nn.Module) -> str:
    return f"{sum(p.numel() for p in module.parameters()) / 1e6:.2f} M"


if __name__ == "__main__":
    sys.exit(run_command(app))
