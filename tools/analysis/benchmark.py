"""The cost of an MoE layer, relative to the dense FFN it replaces.

Run as ``python tools/analysis/benchmark.py``. All layers of a case take turns in one
process, and the ratio of their medians counts. Before timing, the MoE layer is checked
against a plain loop over its experts.

Axes: B images, N tokens per image, V real tokens of the batch, D channels, E experts.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

import damex
from damex import moe
from damex.engine.summary import markdown
from damex.errors import ConfigError
from damex.progress import Bar
from damex.workbench.cli.run import PositiveInt, program, run_command

WIDTH, HIDDEN = 256, 2048  # of DINO's FFNs
TOLERANCE = 1e-4  # relative to the largest output of a loop over experts
HAS_TRANSFORMERS = find_spec("transformers") is not None


class Case(NamedTuple):
    """One problem size."""

    images: int  # B
    tokens: int  # N
    experts: int  # E
    k: int = 1  # experts per token
    by_dataset: bool = False  # an image goes to one expert; else tokens are spread
    padding: float = 0.0  # fraction of tokens at the end of an image

    @property
    def name(self) -> str:
        """Row label."""
        routing = "by dataset" if self.by_dataset else "uniform"
        padded = f", {self.padding:.0%} padding" if self.padding else ""
        return (
            f"{self.images} x {self.tokens:,} tokens{padded}, {self.experts} experts, "
            f"top-{self.k}, {routing}"
        )


# Decoder queries of two images, and all encoder tokens at 800 x 1333.
CASES = (
    *(Case(2, 1100, 8, by_dataset=True), Case(2, 1100, 8), Case(2, 1100, 8, k=2)),
    *(Case(2, 1100, 64), Case(1, 22223, 8), Case(1, 22223, 8, padding=0.3)),
    Case(1, 22223, 64),
)
SMALL = (CASES[0], CASES[1], CASES[3])


class Timing(NamedTuple):
    """Measurements of one layer in one case."""

    name: str  # of the layer
    seconds: float  # median of a step
    ratio: float  # to the dense FFN, timed in the same rounds
    saved: int  # bytes kept for the backward pass, without parameters
    syncs: int  # GPU synchronisations of the host per step


class Baseline(NamedTuple):
    """A layer in the benchmark, under the label of its column."""

    name: str
    module: nn.Module
    is_looped: bool = False  # compute an MoELayer by a loop over its experts

    def forward(self, tokens_BND: Tensor, packing: moe.Packing) -> Tensor:
        """Tokens -> the same shape; modules without experts ignore the padding."""
        if not isinstance(self.module, moe.MoELayer):
            return self.module(tokens_BND)
        if not self.is_looped:
            return self.module(tokens_BND, packing=packing)[0]
        return packing.unpack(loop_over_experts(self.module, packing.pack(tokens_BND)))


def baselines_of(experts: int, k: int, *, width: int, hidden: int) -> list[Baseline]:
    """Return all layers that do the same work, the dense FFN first, then damex's.

    `hidden` is the width of one expert; the dense FFN is k times as wide.
    """
    sizes = (experts, width, hidden)
    layer = _layer(moe.FFNExperts(*sizes), k)
    looped = _layer(moe.FFNExperts(*sizes), k)
    widen = nn.Linear(width, k * hidden)
    narrow = nn.Linear(k * hidden, width)
    baselines = [
        Baseline("dense FFN", nn.Sequential(widen, nn.ReLU(), narrow)),
        Baseline("damex: FFN per expert", layer),
        Baseline("a loop over experts", looped, is_looped=True),
    ]
    if k == 1:
        maps = moe.LowRankExperts(experts, width)
        recipe = _layer(maps, k, moe.SharedExpert(width, hidden))
        baselines.insert(2, Baseline("damex: shared FFN, low-rank maps", recipe))
    return baselines + _of_transformers(*sizes, k)


def loop_over_experts(layer: Any, tokens_VD: Tensor) -> Tensor:
    """Reference output of a layer with FFN experts, linear router and top-k gate."""
    experts = layer.experts
    logits_VE = layer.router(tokens_VD)
    best, chosen = logits_VE.softmax(-1).topk(layer.gate.k, dim=-1)
    best = best / best.sum(-1, keepdim=True)
    out_VD = torch.zeros_like(tokens_VD)
    for expert in range(layer.num_experts):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        hidden = tokens_VD[rows] @ experts.w1_EDH[expert] + experts.b1_EH[expert]
        answer = hidden.relu() @ experts.w2_EHD[expert] + experts.b2_ED[expert]
        out_VD = out_VD.index_add(0, rows, best[rows, place, None] * answer)
    return out_VD


def _layer(
    experts: Any, k: int, shared: moe.SharedExpert | None = None
) -> moe.MoELayer:
    router = moe.LinearRouter(experts.embed_dims, experts.num_experts)
    nn.init.eye_(router.weight_ED)  # expert e scores by channel e alone
    gate = moe.TopKGate(k=k, renormalize=True)
    return moe.MoELayer(router=router, gate=gate, experts=experts, shared_expert=shared)


def _of_transformers(experts: int, width: int, hidden: int, k: int) -> list[Baseline]:
    """Mixtral's layer: gated experts of three matrices, so the width is two thirds."""
    if not HAS_TRANSFORMERS:
        return []
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    baselines = []
    for backend in ("eager", "grouped_mm"):
        config = MixtralConfig(
            hidden_size=width,
            intermediate_size=round(hidden / 12) * 8,  # rows of whole 16 bytes
            num_local_experts=experts,
            num_experts_per_tok=k,
            experts_implementation=backend,
        )
        block = MixtralSparseMoeBlock(config)
        for parameter in block.experts.parameters():
            nn.init.normal_(parameter, std=0.02)
        nn.init.eye_(block.gate.weight)
        baselines.append(Baseline(f"transformers: Mixtral, {backend}", block))
    return baselines


app = program(
    "python tools/analysis/benchmark.py",
    "Time MoE layers against the FFN that they replace.",
    "python tools/analysis/benchmark.py --small --device cuda",
)


@app.default
def benchmark(
    *,
    out: str = "work_dirs/benchmark.md",
    small: bool = False,
    rounds: PositiveInt = 11,
    threads: PositiveInt = 1,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Time MoE layers and write a report.

    Args:
        out: Report in Markdown.
        small: Three quick cases.
        rounds: Measurements of each layer.
        threads: Of torch.
        device: Where the layers run.
        dtype: bfloat16 is by autocast; routers stay in float32.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU; leave --device out.")
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads)
    cases = SMALL if small else CASES
    is_half = dtype == "bfloat16"
    runs: dict[bool, dict[str, list[Timing]]] = {}
    with Bar() as bar:
        bar.begin("cases", 2 * len(cases))
        for training in (True, False):
            for case in cases:
                with torch.autocast(device, torch.bfloat16, enabled=is_half):
                    timings = run_case(case, training, rounds, device)
                runs.setdefault(training, {})[case.name] = timings
                bar.step()
    parts = [
        _head(device, dtype, threads, rounds),
        _table("Training: forward and backward", runs[True], _ratio),
        _table("Inference: forward", runs[False], _ratio),
        _table(
            "MiB that the forward pass keeps for training",
            runs[True],
            lambda timing: f"{timing.saved / 2**20:.0f}",
        ),
    ]
    if device == "cuda":
        title = "How often the host waits for the GPU in a training step"
        parts.append(_table(title, runs[True], lambda timing: str(timing.syncs)))
    text = "\n".join(parts)
    path.write_text(text, encoding="utf-8")
    Console(highlight=False, soft_wrap=True, markup=False).print(text)
    print(f"written: {path}")


def run_case(case: Case, training: bool, rounds: int, device: str) -> list[Timing]:
    """Time all layers of a case; the dense FFN comes first.

    With `training` both passes are timed, else the forward pass. Raises ConfigError if
    the layer differs from a loop over its experts.
    """
    torch.manual_seed(0)
    baselines = baselines_of(case.experts, case.k, width=WIDTH, hidden=HIDDEN)
    tokens_BND, packing = _tokens(case, device)
    for layer in baselines:
        layer.module.to(device).train(training)
    steps = [_step(layer, tokens_BND, packing, training) for layer in baselines]
    with torch.autocast(device, enabled=False):
        _check(baselines[1].module, tokens_BND, packing)
    seconds = medians_in_turns(steps, rounds, device)
    return [
        Timing(
            layer.name,
            seconds=taken,
            ratio=taken / seconds[0],
            saved=saved_bytes(step, layer.module) if training else 0,
            syncs=_count_syncs(step) if device == "cuda" else 0,
        )
        for layer, step, taken in zip(baselines, steps, seconds, strict=True)
    ]


def medians_in_turns(
    steps: Sequence[Callable[[], None]], rounds: int, device: str
) -> list[float]:
    """Time steps in turns; return the median seconds of each."""
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(-1, rounds):  # the first round warms up
        for place in range(len(steps)):  # the order rotates
            index = (place + number) % len(steps)
            taken = _time(steps[index], device)
            if number >= 0:
                seconds[index].append(taken)
    return [*map(statistics.median, seconds)]


def _tokens(case: Case, device: str) -> tuple[Tensor, moe.Packing]:
    """Tokens that the routers send to the experts of the case."""
    tokens_BND = torch.randn(case.images, case.tokens, WIDTH)
    if case.by_dataset:
        for image in range(case.images):
            tokens_BND[image, :, image % case.experts] += 10
    packing = moe.Packing(case.images, case.tokens)
    if case.padding:
        real = round(case.tokens * (1 - case.padding))
        mask_BN = torch.arange(case.tokens).expand(case.images, -1) < real
        packing = moe.Packing.of_mask(mask_BN.to(device))
    return tokens_BND.to(device), packing


def _check(layer: Any, tokens_BND: Tensor, packing: moe.Packing) -> None:
    """Reject a layer of full FFNs with wrong outputs."""
    with torch.no_grad():
        found_BND, _ = layer(tokens_BND, packing=packing)
        expected_VD = loop_over_experts(layer, packing.pack(tokens_BND))
    error = float((packing.pack(found_BND) - expected_VD).abs().max())
    if not error <= TOLERANCE * float(expected_VD.abs().max()):
        raise ConfigError(
            f"the layer differs from a loop over its experts by {error:.2g}, and "
            "nothing was timed; run damex doctor."
        )


def _step(
    layer: Baseline, tokens_BND: Tensor, packing: moe.Packing, training: bool
) -> Callable[[], None]:
    parameters = list(layer.module.parameters()) if training else []

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        inputs_BND = tokens_BND.detach().requires_grad_(training)
        with torch.set_grad_enabled(training):
            out_BND = layer.forward(inputs_BND, packing)
        if training:
            out_BND.backward(torch.ones_like(out_BND))

    return step


def _time(step: Callable[[], None], device: str) -> float:
    """Seconds of one step: process time per thread on the CPU, else wall-clock time."""
    if device == "cpu":
        started = time.process_time()
        step()
        return (time.process_time() - started) / torch.get_num_threads()
    torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def saved_bytes(step: Callable[[], None], module: nn.Module) -> int:
    """Bytes kept for the backward pass: each storage once, without parameters."""
    there = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step()
    return sum(kept.values())


def _count_syncs(step: Callable[[], None]) -> int:
    """GPU synchronisations of a step, as counted by torch."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in found)


def _table(
    title: str, timings: Mapping[str, Sequence[Timing]], cell: Callable[[Timing], str]
) -> str:
    """A row per case, a column per layer."""
    cells = {case: {t.name: cell(t) for t in row} for case, row in timings.items()}
    names = list(dict.fromkeys(name for row in cells.values() for name in row))
    rows = [[case, *(row.get(n, "-") for n in names)] for case, row in cells.items()]
    return f"## {title}\n\n{markdown(['case', *names], rows)}"


def _ratio(timing: Timing) -> str:
    taken = f" ({1e3 * timing.seconds:.1f} ms)" if timing.ratio == 1.0 else ""
    return f"{timing.ratio:.2f}{taken}"


def _head(device: str, dtype: str, threads: int, rounds: int) -> str:
    absent = "not installed (pip install 'damex[benchmark]')"
    facts = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": hardware(device),
        "threads": threads,
        "rounds": rounds,
        "torch": torch.__version__,
        "damex": damex.__version__,
        "transformers": version("transformers") if HAS_TRANSFORMERS else absent,
    }
    lines = [f"- {key}: {value}" for key, value in facts.items()]
    about = (
        f"FFN {WIDTH}-{HIDDEN}-{WIDTH} in {dtype}. A dense FFN of the same active "
        "size is 1.00; medians of rounds in which all layers of a case take turns, in "
        "processor time on the CPU."
    )
    return "\n".join(["# Layers of experts, timed", "", about, "", *lines, ""])


def hardware(device: str) -> str:
    """Return the name of the GPU or CPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return models[0] if models else platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(run_command(app))
