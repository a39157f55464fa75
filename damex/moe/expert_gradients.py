"""Gradients of experts that are sharded over processes, which DDP does not reduce.

DDP averages gradients over all processes, as the loss is the mean of their losses. That
of an expert exists on the processes of its column only and sums over the tokens that
they received: its sum over the column, divided by the number of all processes, is the
gradient of the same mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from damex.moe.layer import MoELayer
from damex.moe.shards import ExpertShards


def sharded_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Return the layers whose experts are sharded over processes, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MoELayer) and module.shards is not None
    }


def sharded_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that DDP must ignore."""
    found = []
    for name, layer in sharded_layers(model).items():
        prefix = f"{name}.experts." if name else "experts."
        bank = cast(nn.Module, layer.experts)
        found += [prefix + own for own, _ in bank.named_parameters()]
        found += [prefix + own for own, _ in bank.named_buffers()]
    return found


@contextmanager
def gathered_experts(
    models: Iterable[nn.Module],
    optimizer: Optimizer | None = None,
    *,
    keep: bool = True,
) -> Iterator[None]:
    """Gather the experts of all sharded layers, see `ExpertShards.gathered`."""
    with ExitStack() as stack:
        for model in models:
            for layer in sharded_layers(model).values():
                bank, shards = cast(nn.Module, layer.experts), layer.shards
                if shards is not None:
                    stack.enter_context(shards.gathered(bank, optimizer, keep=keep))
        yield


class ExpertGradients:
    """Reduction of expert gradients, as DDP does for all others, and global clipping.

    Call `reduce` once per optimizer step, after the (last accumulated) backward pass
    and before anything reads gradients. Raises ValueError if the model has no sharded
    experts.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [*sharded_layers(model).values()]
        if not layers:
            raise ValueError("ExpertGradients: the model has no sharded experts")
        self._shards: ExpertShards = layers[0].shards  # type: ignore[assignment]
        # In the same order on all processes, as collectives are matched by order.
        banks = [cast(nn.Module, layer.experts) for layer in layers]
        self._parameters = [p for bank in banks for p in bank.parameters()]
        self._ids = {id(parameter) for parameter in self._parameters}

    def reduce(self) -> None:
        """Make expert gradients those of the mean loss of all processes."""
        shards = self._shards
        grads = [p.grad for p in self._parameters if p.grad is not None]
        is_alone = shards.num_processes == shards.size
        works = [
            distributed.all_reduce(grad, group=shards.column, async_op=True)
            for grad in ([] if is_alone else grads)
        ]
        for work in works:
            work.wait()
        for grad in grads:
            grad.div_(shards.num_processes)

    @torch.no_grad()
    def clip_grad_norm(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_`, over the experts of all processes.

        Call `reduce` before. Returns the norm before clipping, equal on all processes.
        """
        parameters = list(parameters)
        total = self._norm(parameters, norm_type, foreach)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"clip_grad_norm: the total norm of order {norm_type} is {total}"
            )
        clip_grads_with_norm_(parameters, max_norm, total, foreach)
        return total

    def _norm(
        self, parameters: list[Tensor], order: float, foreach: bool | None
    ) -> Tensor:
        grads = [(id(p) in self._ids, p.grad) for p in parameters]
        own, common = (
            get_total_norm(
                [g for is_own, g in grads if g is not None and is_own == wanted],
                order,
                foreach=foreach,
            )
            for wanted in (True, False)
        )
        # Without gradients (frozen experts) torch returns a norm on the CPU.
        own, common = own.to(self._shards.device), common.to(self._shards.device)
        row = self._shards.row
        if math.isinf(order):
            distributed.all_reduce(own, distributed.ReduceOp.MAX, group=row)
            return torch.maximum(own, common)
        power = own.pow(order)
        distributed.all_reduce(power, group=row)
        return (power + common.pow(order)).pow(1.0 / order)
