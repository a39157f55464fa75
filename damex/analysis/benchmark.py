"""``damex benchmark``: the cost of an MoE layer, relative to the dense FFN it replaces.

All layers of a case take turns in one process, and the ratio of their medians counts.
Before timing, the MoE layer is checked against a plain loop over its experts.

Axes: B images, N tokens per image, D model width, E experts.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import damex
from damex.analysis.comparison import markdown
from damex.analysis.rivals import Rival, loop_over_experts, rivals_of
from damex.commandline.bar import Bar
from damex.commandline.measuring import benchmark_parser
from damex.errors import ConfigError
from damex.moe import MoELayer, Packing

WIDTH, HIDDEN = 256, 2048  # of DINO's FFNs
TOLERANCE = 1e-4  # relative to the largest output of a loop over experts
SEED = 0


@dataclass(frozen=True)
class Case:
    """One problem size.

    Attributes:
        images: B.
        tokens: N.
        experts: E.
        k: Experts per token.
        by_dataset: Whether all tokens of an image go to one expert; else they are
            spread evenly.
        padding: Fraction of tokens at the end of an image that are padding.
    """

    images: int
    tokens: int
    experts: int
    k: int = 1
    by_dataset: bool = False
    padding: float = 0.0

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
    Case(2, 1100, 8, by_dataset=True),
    Case(2, 1100, 8),
    Case(2, 1100, 8, k=2),
    Case(2, 1100, 64),
    Case(1, 22223, 8),
    Case(1, 22223, 8, padding=0.3),
    Case(1, 22223, 64),
)
SMALL = (Case(2, 1100, 8, by_dataset=True), Case(2, 1100, 8), Case(2, 1100, 64))


@dataclass(frozen=True)
class Timing:
    """Measurements of one layer in one case.

    Attributes:
        name: Of the layer.
        seconds: Median of a step.
        ratio: To the dense FFN, timed in the same rounds.
        saved: Bytes kept by the forward pass for the backward pass, without parameters;
            0 in inference.
        syncs: GPU synchronisations of the host per step; 0 on the CPU.
    """

    name: str
    seconds: float
    ratio: float
    saved: int
    syncs: int


def benchmark(arguments: Sequence[str]) -> None:
    """Time MoE layers and write a report."""
    args = benchmark_parser().parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU; leave --device out.")
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    cases = SMALL if args.small else CASES
    is_half = args.dtype == "bfloat16"
    runs: dict[bool, dict[str, list[Timing]]] = {}
    with Bar() as bar:
        bar.begin("cases", 2 * len(cases))
        for training in (True, False):
            runs[training] = {}
            for case in cases:
                with torch.autocast(args.device, torch.bfloat16, enabled=is_half):
                    timings = run_case(case, training, args.rounds, args.device)
                runs[training][case.name] = timings
                bar.advance()
    parts = [
        _head(args),
        _table("Training: forward and backward", runs[True], _ratio),
        _table("Inference: forward", runs[False], _ratio),
        _table("MiB that the forward pass keeps for training", runs[True], _memory),
    ]
    if args.device == "cuda":
        title = "How often the host waits for the GPU in a training step"
        parts.append(_table(title, runs[True], lambda timing: str(timing.syncs)))
    text = "\n".join(parts)
    out.write_text(text, encoding="utf-8")
    Console(highlight=False, soft_wrap=True, markup=False).print(text)
    print(f"written: {out}")


def run_case(case: Case, training: bool, rounds: int, device: str) -> list[Timing]:
    """Time all layers of a case; the dense FFN comes first.

    They take turns for some `rounds`, in an order that rotates. With `training` both
    passes are timed, else the forward pass.

    Raises:
        ConfigError: If the layer differs from a loop over its experts.
    """
    torch.manual_seed(SEED)
    rivals = rivals_of(case.experts, case.k, embed_dims=WIDTH, hidden_dims=HIDDEN)
    tokens_BND, packing = _tokens(case, device)
    steps: list[Callable[[], None]] = []
    for rival in rivals:
        rival.module.to(device).train(training)
        steps.append(_step(rival, tokens_BND, packing, training))
    with torch.autocast(device, enabled=False):
        _check(rivals, tokens_BND, packing)
    seconds: list[list[float]] = [[] for _ in rivals]
    for number in range(-1, rounds):  # the first round warms up
        for index in _rotated(len(rivals), number):
            taken = _time(steps[index], device)
            if number >= 0:
                seconds[index].append(taken)
    medians = [statistics.median(values) for values in seconds]
    saved = [
        _saved_bytes(step, rival.module) if training else 0
        for step, rival in zip(steps, rivals, strict=True)
    ]
    syncs = [_count_syncs(step) if device == "cuda" else 0 for step in steps]
    return [
        Timing(rival.name, median, median / medians[0], *rest)
        for rival, median, *rest in zip(rivals, medians, saved, syncs, strict=True)
    ]


def _tokens(case: Case, device: str) -> tuple[Tensor, Packing]:
    """Tokens that the routers send to the experts of the case."""
    tokens_BND = torch.randn(case.images, case.tokens, WIDTH)
    if case.by_dataset:
        for image in range(case.images):
            tokens_BND[image, :, image % case.experts] += 10
    packing = Packing(case.images, case.tokens)
    if case.padding:
        real = round(case.tokens * (1 - case.padding))
        mask_BN = torch.arange(case.tokens).expand(case.images, -1) < real
        packing = Packing.of_mask(mask_BN.to(device))
    return tokens_BND.to(device), packing


def _check(rivals: Sequence[Rival], tokens_BND: Tensor, packing: Packing) -> None:
    """Reject a layer with wrong outputs."""
    layer = next(rival.module for rival in rivals if isinstance(rival.module, MoELayer))
    with torch.no_grad():
        found_BND, _ = layer(tokens_BND, packing=packing)
        expected_VD = loop_over_experts(layer, packing.pack(tokens_BND))
    error = float((packing.pack(found_BND) - expected_VD).abs().max())
    if not error <= TOLERANCE * float(expected_VD.abs().max()):
        raise ConfigError(
            f"the layer differs from a loop over its experts by {error:.2g}: this "
            "installation computes something else; nothing was timed. "
            "Run damex doctor."
        )


def _step(
    rival: Rival, tokens_BND: Tensor, packing: Packing, training: bool
) -> Callable[[], None]:
    parameters = list(rival.module.parameters())

    def train() -> None:
        for parameter in parameters:
            parameter.grad = None
        inputs_BND = tokens_BND.detach().requires_grad_()
        out_BND = rival.forward(inputs_BND, packing)
        out_BND.backward(torch.ones_like(out_BND))

    def predict() -> None:
        with torch.no_grad():
            rival.forward(tokens_BND, packing)

    return train if training else predict


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


def _saved_bytes(step: Callable[[], None], module: nn.Module) -> int:
    """Bytes kept for the backward pass: each storage once, without parameters."""
    there = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
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


def _rotated(count: int, by: int) -> Iterator[int]:
    return ((index + by) % count for index in range(count))


def _table(
    title: str, timings: Mapping[str, Sequence[Timing]], cell: Callable[[Timing], str]
) -> str:
    """A row per case, a column per layer."""
    names = list(dict.fromkeys(t.name for row in timings.values() for t in row))
    rows = []
    for case, row in timings.items():
        cells = {timing.name: cell(timing) for timing in row}
        rows.append([case, *(cells.get(name, "-") for name in names)])
    return f"## {title}\n\n{markdown(['case', *names], rows)}"


def _ratio(timing: Timing) -> str:
    if timing.ratio == 1.0:
        return f"1.00 ({1e3 * timing.seconds:.1f} ms)"
    return f"{timing.ratio:.2f}"


def _memory(timing: Timing) -> str:
    return f"{timing.saved / 2**20:.0f}"


def _head(args: argparse.Namespace) -> str:
    names = {"torch": torch.__version__, "damex": damex.__version__}
    try:
        names["transformers"] = version("transformers")
    except ModuleNotFoundError:
        names["transformers"] = "not installed (pip install 'damex[benchmark]')"
    facts = {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "hardware": _hardware(args.device),
        "threads": args.threads,
        "rounds": args.rounds,
        "commit": _commit(),
        **names,
    }
    lines = [f"- {key}: {value}" for key, value in facts.items()]
    about = (
        f"FFN {WIDTH}-{HIDDEN}-{WIDTH} in {args.dtype}. A dense FFN of the same active "
        "size is 1.00; medians of rounds in which all layers of a case take turns, in "
        "processor time on the CPU."
    )
    return "\n".join(["# Layers of experts, timed", "", about, "", *lines, ""])


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return models[0] if models else platform.processor() or platform.machine()


def _commit() -> str:
    checkout, commit = Path(damex.__file__).parents[1], ""
    if (checkout / ".git").exists():  # else git would find an enclosing repository
        command = ["git", "rev-parse", "--short", "HEAD"]
        with contextlib.suppress(OSError):  # git is not installed
            commit = subprocess.run(
                command, cwd=checkout, capture_output=True, text=True, check=False
            ).stdout.strip()
    return commit or f"of damex {damex.__version__}"
