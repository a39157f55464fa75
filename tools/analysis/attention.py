"""Time and memory of deformable attention: deformops against torch.

Run as ``python tools/analysis/attention.py --device cuda``. It times the sampling in an
encoder layer of DINO at 800 x 1333, where every token of four levels is a query.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.checkpoint import checkpoint

import damex.models  # noqa: F401  (first: it keeps mmcv's import silent)
from damex.compat.kernels import deformable_attention, fused_attention
from damex.engine.summary import markdown
from damex.errors import ConfigError
from damex.progress import Bar
from damex.workbench.cli.run import program, run_command

HEADS, CHANNELS, POINTS = 8, 32, 4
LEVELS = ((100, 167), (50, 84), (25, 42), (13, 21))  # 22,223 tokens
SMALL = ((13, 21), (7, 11), (4, 6), (2, 3))
DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = ("dtype", "computed by", "forward", "forward and backward", "peak memory")
Compute = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
app = program(
    "python tools/analysis/attention.py",
    "Time deformable attention of deformops and of torch.",
    "python tools/analysis/attention.py --device cuda",
)


@app.default
def attention(
    *,
    out: str = "work_dirs/attention.md",
    small: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    seconds: float = 2.0,
) -> None:
    """Time deformable attention and write a report.

    Args:
        out: Report in Markdown.
        small: 380 tokens instead of 22,223.
        device: Where it runs; on the CPU, deformops has no kernels and uses torch.
        seconds: Time for each measurement; the median is reported.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU; leave --device out.")
    levels = SMALL if small else LEVELS
    rows = []
    with Bar() as bar:
        bar.begin("measurements", len(DTYPES) * len(ways()))
        for dtype in DTYPES:
            for name, compute in ways().items():
                cells = measure(compute, draw(levels, dtype, device), seconds)
                rows.append([str(dtype).removeprefix("torch."), name, *cells])
                bar.step()
    tokens = sum(height * width for height, width in levels)
    hardware = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    head = (
        "# Deformable attention, timed\n\n"
        f"{tokens:,} tokens of {len(levels)} levels, each a query; {HEADS} heads of "
        f"{CHANNELS} channels, {POINTS} points per level; one image. Medians on "
        f"{hardware}, torch {torch.__version__}.\n"
    )
    text = "\n".join((head, markdown(COLUMNS, rows)))
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    Console(highlight=False, soft_wrap=True, markup=False).print(text)
    print(f"written: {path}")


def ways() -> dict[str, Compute]:
    """Return the implementations at hand by name."""
    found: dict[str, Compute] = {
        "torch": deformable_attention,
        "torch, sampling again": partial(
            checkpoint,
            deformable_attention,
            use_reentrant=False,
            preserve_rng_state=False,
        ),
    }
    if find_spec("deformops") is not None:
        found[f"deformops {version('deformops')}"] = fused_attention
    return found


def draw(
    levels: tuple[tuple[int, int], ...], dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Return random features, shapes, points and weights, as an encoder layer has."""
    torch.manual_seed(0)
    shapes = torch.tensor(levels)
    tokens = int(shapes.prod(1).sum())
    sizes = (1, tokens, HEADS, len(levels), POINTS)
    value = torch.randn(1, tokens, HEADS, CHANNELS, dtype=dtype)
    points = torch.rand(*sizes, 2)  # float32, as under autocast
    weights = torch.rand(sizes).flatten(3).softmax(-1).view(sizes).to(dtype)
    return [one.to(device) for one in (value, shapes, points, weights)]


def measure(compute: Compute, inputs: list[Tensor], seconds: float) -> list[str]:
    """Return the cells of a row: two times in ms and the peak memory in MiB.

    Memory is that allocated on the GPU in both passes, on top of the inputs.
    """
    value, shapes, points, weights = inputs
    leaves = [one.requires_grad_() for one in (value, points, weights)]

    def forward() -> Tensor:
        return compute(value, shapes, points, weights)

    def train() -> None:
        torch.autograd.grad(forward().float().sum(), leaves)

    try:
        train()  # compiles
    except Exception as error:  # of a compiler, or of a GPU
        return [f"fails: {' '.join(str(error).split()):.80}", "-", "-"]
    peak = "-"
    if value.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train()
        peak = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"
    times = [
        Timer("run()", globals=dict(run=run)).blocked_autorange(min_run_time=seconds)
        for run in (forward, train)
    ]
    return [*(f"{1e3 * one.median:.2f} ms" for one in times), peak]


if __name__ == "__main__":
    sys.exit(run_command(app))
