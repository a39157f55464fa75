"""Experts of a layer sharded over processes, and the exchange of tokens between them.

The processes form a grid (data, expert): those of one row share the experts, those of
one column hold the same ones. Each process sends its tokens to the process of its row
that holds the expert, and receives the outputs.

DDP averages gradients over all processes, as the loss is the mean of their losses. That
of an expert exists on the processes of its column only and sums over the tokens that
they received: its sum over the column, divided by the number of all processes, is the
gradient of the same mean.

Axes: E experts, P processes of a row, L = E / P experts of one process, R rows of this
process sorted by expert, S rows that the experts of this process serve, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

MESH_AXES = ("data", "expert")


class ExpertShards:
    """Which experts this process holds, and how to reach those of other processes.

    One object serves all layers. All processes of the row, also those without tokens,
    must call methods that communicate in the same order. `size` is P, `index` that of
    this process in its row; `mesh` is the grid, with the axes `MESH_AXES`.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size = mesh.size(1)
        self.index = mesh.get_local_rank("expert")

    @classmethod
    def of_world(cls, size: int, *, device_type: str = "cpu") -> ExpertShards:
        """Build the grid of all processes, with `size` P; collective.

        Neighbors share experts: with size=4, processes 0 to 3 hold each expert once, as
        do 4 to 7, so that tokens stay within a machine of 4 or 8 GPUs. P divides the
        number of processes.
        """
        shape = (distributed.get_world_size() // size, size)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=MESH_AXES)
        _copy_timeout(mesh)
        return cls(mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertShards:
        """Return itself: copies of a layer communicate with the same processes."""
        return self

    @property
    def device(self) -> torch.device:
        """Device of tensors in an exchange; nccl does not take CPU tensors."""
        return torch.device(self.mesh.device_type)

    @property
    def num_processes(self) -> int:
        """Number of all processes of the grid."""
        return self.mesh.size()

    @property
    def row(self) -> ProcessGroup:
        """The processes that share the experts."""
        return self.mesh.get_group("expert")

    @property
    def column(self) -> ProcessGroup:
        """The processes that hold the same experts as this one."""
        return self.mesh.get_group("data")

    def own(self, values_E: Tensor) -> Tensor:
        """Return the slice of this process, (E, ...) -> (L, ...)."""
        return values_E.tensor_split(self.size)[self.index]

    def gather(self, values_L: Tensor) -> Tensor:
        """Gather the slices of all processes of the row, (L, ...) -> (E, ...)."""
        local_L = values_L.to(self.device).contiguous()
        slices = [torch.empty_like(local_L) for _ in range(self.size)]
        distributed.all_gather(slices, local_L, group=self.row)
        return torch.cat(slices).to(values_L.device)

    def shard(self, bank: nn.Module) -> None:
        """Drop the experts of other processes from a bank, in place.

        All processes start from the weights of the first one, as under DDP;
        `num_experts` of the bank stays E. Raises ValueError if P does not divide E, or
        the first axis of a parameter or buffer does not count experts.
        """
        num_experts = cast(Any, bank).num_experts
        if num_experts % self.size:
            raise ValueError(
                f"ExpertShards: {num_experts} experts cannot be divided evenly among "
                f"{self.size} processes"
            )
        for name, tensor in bank.state_dict().items():
            if tensor.shape[:1] != (num_experts,):
                raise ValueError(
                    f"ExpertShards: {name} of {type(bank).__name__} has the shape "
                    f"{tuple(tensor.shape)}, but its first axis must count the "
                    f"{num_experts} experts"
                )
        for tensor in (*bank.parameters(), *bank.buffers()):
            first_E = tensor.data.to(self.device)  # models are built on the CPU
            distributed.broadcast(first_E, src=0)
            tensor.data = self.own(first_E).to(tensor.device, copy=True)

    @contextmanager
    def gathered(
        self, bank: nn.Module, optimizer: Optimizer | None = None, *, keep: bool = True
    ) -> Iterator[None]:
        """Gather all experts of a bank within the context, to draw, load or save them.

        The state of `optimizer` is gathered as well. All processes must enter; without
        `keep` the experts take no memory. Afterwards each process keeps its slice of
        the result. Nested contexts have no effect.
        """
        num_experts = cast(Any, bank).num_experts
        tensors = (*bank.parameters(), *bank.buffers())
        parts = [t for t in tensors if t.shape[0] < num_experts]
        kept = []
        for tensor in parts:
            local_L, full_E = tensor.data, self.gather(tensor.data)
            state = {} if optimizer is None else optimizer.state.get(tensor, {})
            found = {
                key: self.gather(value)
                for key, value in state.items()
                if _is_shaped(value, local_L)
            }
            if keep:
                kept.append((tensor, local_L))
                tensor.data = full_E
                state.update(found)
        try:
            yield
        finally:
            for tensor, local_L in kept:
                state = {} if optimizer is None else optimizer.state.get(tensor, {})
                for key, value in state.items():
                    if _is_shaped(value, tensor):
                        state[key] = self.own(value).clone()
                tensor.data = local_L.copy_(self.own(tensor.data))

    def run(
        self,
        experts: Callable[[Tensor, Tensor], Tensor],
        rows_RD: Tensor,
        counts_E: Tensor,
    ) -> Tensor:
        """Apply the expert of each row, on whichever process holds it.

        Gradients return the same way. The counts are read on the host, as an exchange
        needs its sizes. `experts` are those of this process: rows (S, D) sorted by
        expert and counts (L,) -> rows of any width, also for S = 0.
        """
        sent_PL = counts_E.view(self.size, -1)
        received_PL = torch.empty_like(sent_PL)
        distributed.all_to_all_single(received_PL, sent_PL.contiguous(), group=self.row)
        # Rows arrive process by process, sorted by expert within each.
        experts_PL = torch.arange(
            received_PL.shape[1], device=counts_E.device
        ).expand_as(received_PL)
        expert_S = experts_PL.flatten().repeat_interleave(received_PL.flatten())
        order_S = torch.argsort(expert_S, stable=True)
        sent, received = sent_PL.sum(1).tolist(), received_PL.sum(1).tolist()
        rows_SD = _Exchange.apply(rows_RD, sent, received, self.row)
        out_SD = experts(rows_SD.index_select(0, order_S), received_PL.sum(0))
        out_SD = out_SD.index_select(0, torch.argsort(order_S))
        return _Exchange.apply(out_SD, received, sent, self.row)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows that is differentiable.

    The one in `torch.distributed.nn.functional` is deprecated, others are private.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: ProcessGroup,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group)
        return back, None, None, None


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup
) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    distributed.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


def _copy_timeout(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh the timeout of the world; torch sets its default."""
    c10d: Any = distributed.distributed_c10d
    # torch 2.6 has the private one only.
    set_timeout = getattr(distributed, "set_timeout", None) or c10d._set_pg_timeout
    device = torch.device(mesh.device_type)
    timeout = _timeout_of(distributed.group.WORLD, device)
    for axis in MESH_AXES:
        group = mesh.get_group(axis)
        if _timeout_of(group, device) != timeout:
            set_timeout(timeout, group)


def _timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Return the timeout of a group; None if its backend has none."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def _is_shaped(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


def sharded_layers(model: nn.Module) -> dict[str, Any]:
    """Return the MoE layers whose experts are sharded over processes, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "shards", None), ExpertShards)
    }


def sharded_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that DDP must ignore."""
    found = []
    for name, layer in sharded_layers(model).items():
        prefix = f"{name}.experts." if name else "experts."
        found += [prefix + own for own, _ in layer.experts.named_parameters()]
        found += [prefix + own for own, _ in layer.experts.named_buffers()]
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
                gathered = layer.shards.gathered(layer.experts, optimizer, keep=keep)
                stack.enter_context(gathered)
        yield


class ExpertGradients:
    """Reduction of expert gradients, as DDP does for all others, and global clipping.

    Call `reduce` once per optimizer step, after the (last accumulated) backward pass
    and before anything reads gradients. The model has sharded experts.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [*sharded_layers(model).values()]
        self._shards: ExpertShards = layers[0].shards
        # In the same order on all processes, as collectives are matched by order.
        self._parameters = [p for one in layers for p in one.experts.parameters()]
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
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_`, over the experts of all processes.

        Call `reduce` before. Returns the norm before clipping, equal on all processes.
        """
        parameters = list(parameters)
        total = self._norm(parameters, norm_type)
        clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def _norm(self, parameters: list[Tensor], order: float) -> Tensor:
        grads = [(id(p) in self._ids, p.grad) for p in parameters]
        own, common = (
            get_total_norm(
                [g for is_own, g in grads if g is not None and is_own == wanted], order
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
