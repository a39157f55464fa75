"""``moe.expert_parallel``: a detector's experts sharded over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from mmengine.device import get_device
from mmengine.dist import all_reduce, get_world_size, is_distributed
from torch import nn
from torch.distributed.fsdp import FSDPModule

from damex.errors import ConfigError
from damex.models.blocks import MoEBlock, MoEFFN
from damex.models.config import MoEConfig
from damex.moe import ExpertShards, sharded_layers

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "upcycling": "would have to copy an expert to all processes in mid-training; "
        "train the dense detector first and start from it with load_from=CHECKPOINT",
        "router_warmup": "has steps without a gradient for all other parameters, which "
        "DDP would have to look for; warm up in a run of its own and start from it "
        "with load_from=CHECKPOINT",
    }
)


def shard_experts(config: MoEConfig, blocks: Sequence[MoEBlock]) -> str:
    """Keep only this process's experts, as ``moe.expert_parallel`` asks.

    All processes call this together, after each has drawn all experts, so that they
    start as in a single process. Returns the layout in words.

    Raises:
        ConfigError: If there are too few processes, numbers do not divide, or an option
            does not support sharded experts.
    """
    size = config.expert_parallel
    for name, reason in REASONS.items():
        if getattr(config, name) is not None:
            raise ConfigError(
                f"moe.expert_parallel={size} and moe.{name} cannot be set together: "
                f"{name} {reason}, or leave one of them out."
            )
    num_experts = blocks[0].moe.num_experts
    if not all(isinstance(block, MoEFFN) for block in blocks):
        raise ConfigError(
            f"moe.expert_parallel={size}: PatchConvExperts are small slices of one "
            "convolution, whose patches are larger than the answers; exchanging them "
            "is not supported. Set moe.expert_parallel=1."
        )
    if num_experts % size:
        raise ConfigError(
            f"moe.expert_parallel={size} must divide the number of experts, "
            f"{num_experts}, so that each process holds as many; set "
            f"moe.expert_parallel to one of {_divisors(num_experts)}, or "
            f"moe.num_experts={(num_experts // size + 1) * size}."
        )
    count = get_world_size()
    if count % size or not is_distributed():
        raise ConfigError(
            f"moe.expert_parallel={size} needs a number of processes that it divides, "
            f"and there are {count}; start {size} processes, or a multiple of that, "
            f"with torchrun --nproc_per_node={size} tools/train.py CONFIG --launcher "
            f"pytorch, or set moe.expert_parallel to one of {_divisors(count)} "
            "(checkpoints are the same)."
        )
    shards = ExpertShards.of_world(size, device_type=get_device())
    try:
        for block in blocks:
            block.moe.shard_experts(shards)
    except ValueError as error:
        raise ConfigError(
            f"moe.expert_parallel={size}: {error}; set moe.expert_parallel=1."
        ) from error
    rows, each = count // size, num_experts // size
    first = shards.index * each
    return (
        f"of {num_experts} experts each process holds {each} (this one {first} to "
        f"{first + each - 1}); {rows} x {size} processes (data x experts)"
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def missing_passes(detector: nn.Module, count: int) -> int:
    """How many more forward passes another process makes, if all must take part.

    Sharded parameters are gathered in each pass, and a process that makes fewer passes
    would leave the others waiting.
    """
    if not (isinstance(detector, FSDPModule) or sharded_layers(detector)):
        return 0
    most = torch.tensor(count, device=get_device())
    all_reduce(most, "max")
    return int(most) - count
