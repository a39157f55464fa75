"""Initial weights: everything but the experts starts as in the dense detector.

Two trainings with one seed, with and without experts, then differ by the experts alone:
weights, image order and denoising noise start the same. This makes their difference
less noisy, as initial weights matter much in short trainings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from mmcv.cnn.bricks.transformer import FFN
from torch import nn

from damex.models.blocks import MoEFFN
from damex.models.upcycling import DENSE_EXPERT, dense_keys


@contextmanager
def own_random_stream(seed: int | None = None) -> Iterator[None]:
    """Use a separate random stream, by default seeded from the CPU's, then restore."""
    # torch.manual_seed would also reseed GPUs, now or when CUDA is first used.
    generators = [torch.default_generator, *torch.cuda.default_generators]
    states = [generator.get_state() for generator in generators]
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def ffns_in_place(detector: nn.Module) -> Iterator[list[tuple[MoEFFN, FFN]]]:
    """Temporarily replace the MoE blocks by new FFNs; yield each block with its FFN.

    Weights drawn meanwhile are drawn as for a dense detector.
    """
    layers: list[Any] = [
        m for m in detector.modules() if isinstance(getattr(m, "ffn", None), MoEFFN)
    ]
    places = []
    with own_random_stream(), torch.no_grad():
        for layer in layers:
            ffn = FFN(**layer.ffn_cfg).to(next(layer.ffn.parameters()).device)
            linears = (ffn.layers[0][0], ffn.layers[1])
            for linear, bias in zip(linears, layer.ffn.dense_biases, strict=True):
                linear.bias.copy_(bias)
            places.append((layer.ffn, ffn))
    try:
        for layer, (_, ffn) in zip(layers, places, strict=True):
            layer.ffn = ffn
        yield places
    finally:
        for layer, (block, _) in zip(layers, places, strict=True):
            layer.ffn = block


@torch.no_grad()
def copy_draws(block: MoEFFN, dense: FFN) -> None:
    """Copy freshly drawn FFN weights to the part of a block that replaces the FFN.

    This is the shared expert, the FFN that fine-grained experts are cut from, or the
    expert of a dense phase. Plain experts keep their draws, as do parts of another
    width or with a custom initializer.
    """
    moe: Any = block.moe
    if getattr(moe.experts, "init_std", None) is not None:
        return
    tensors = dense.state_dict()
    drawn = {n: tensors[key] for n, key in dense_keys(block.state_dict(), "").items()}
    if block.split is not None:
        with suppress(ValueError):
            block.split.load(moe, list(drawn.values()))
        return
    bank, expert = moe.experts, DENSE_EXPERT
    if moe.shared_expert is not None:
        bank, expert = moe.shared_expert.expert, 0
    elif not block.is_dense:
        return
    own = bank.state_dict()
    pairs = [
        (own[name][expert], value.t() if name.startswith("w") else value)
        for name, value in drawn.items()
    ]
    if all(row.shape == value.shape for row, value in pairs):
        for row, value in pairs:
            row.copy_(value)
