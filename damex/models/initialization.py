"""Initial weights: everything but the experts starts as in the dense detector.

Two trainings with one seed, with and without experts, then differ by the experts alone:
weights, image order and denoising noise start the same. This makes their difference
less noisy, as initial weights matter much in short trainings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor, nn

from damex.models.blocks import MoEFFN
from damex.models.dense_phase import DENSE_EXPERT
from damex.models.upcycling import dense_keys


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
    blocks: list[MoEFFN] = [layer.ffn for layer in layers]
    with own_random_stream():
        ffns = [
            _ffn_for(block, layer.ffn_cfg)
            for block, layer in zip(blocks, layers, strict=True)
        ]
    try:
        for layer, ffn in zip(layers, ffns, strict=True):
            layer.ffn = ffn
        yield list(zip(blocks, ffns, strict=True))
    finally:
        for layer, block in zip(layers, blocks, strict=True):
            layer.ffn = block


@torch.no_grad()
def _ffn_for(block: MoEFFN, config: Mapping[str, Any]) -> FFN:
    """Build an FFN like the one that a block replaced, on the block's device."""
    ffn = FFN(**config).to(next(block.parameters()).device)
    for layer, bias in zip(
        (ffn.layers[0][0], ffn.layers[1]), block.dense_biases, strict=True
    ):
        layer.bias.copy_(bias)
    return ffn


@torch.no_grad()
def take_draws(block: MoEFFN, dense: FFN) -> None:
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
    elif moe.shared_expert is not None:
        _load_expert(moe.shared_expert.expert, 0, drawn)
    elif block.is_dense:
        _load_expert(moe.experts, DENSE_EXPERT, drawn)


def _load_expert(bank: nn.Module, expert: int, drawn: Mapping[str, Tensor]) -> None:
    """Write the tensors of an FFN into an expert, if they fit."""
    own = bank.state_dict()
    pairs = [
        (own[name][expert], value.t() if name.startswith("w") else value)
        for name, value in drawn.items()
    ]
    if all(row.shape == value.shape for row, value in pairs):
        for row, value in pairs:
            row.copy_(value)
