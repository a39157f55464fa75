"""Fully sharded training: ``model_wrapper_cfg=dict(type="FullySharded")``.

FSDP2, ``torch.distributed.fsdp.fully_shard`` (Zhao et al. 2023, arXiv 2304.11277):
every process keeps a shard of each parameter, gradient and moment; a unit (a
transformer layer, a bank of experts) is gathered while it is computed. Weights are
drawn and loaded before sharding and saved as a whole, so checkpoints do not depend on
the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from mmengine.device import get_device
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.sites import COMPONENTS
from damex.moe import sharded_layers

FULLY_SHARDED = "FullySharded"


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether the parameters of a model are sharded over processes."""
    return isinstance(model, FSDPModule)


def check_config(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a training needs whole parameters."""
    wrapper = config.get("optim_wrapper") or {}
    faults = {
        "sync_bn": config.get("sync_bn"),
        "train_only": config.get("train_only"),
        "optim_wrapper.constructor": wrapper.get("constructor"),
        "moe.upcycling or moe.router_warmup": getattr(model, "trains_in_stages", False),
        "moe.expert_parallel": sharded_layers(model),
    }
    for what, found in faults.items():
        if found:
            raise ConfigError(
                f"{what} needs whole parameters, and with model_wrapper_cfg.type="
                f"{FULLY_SHARDED!r} no process has them; leave one of the two out."
            )


def shard_fully(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Shard the parameters of a detector, in place, and its optimiser with its state.

    All processes must hold the same weights.
    """
    places = _parameters(model)
    for _, _, parameter in places:
        parameter.data = parameter.data.contiguous()  # FSDP rejects channels-last
    mesh = init_device_mesh(get_device(), (distributed.get_world_size(),))
    for unit in (*_units(model), model):
        fully_shard(unit, mesh=mesh)
    shares: dict[Any, Any] = {
        whole: module._parameters[name] for module, name, whole in places
    }
    states = {
        whole: {key: _shared(value, shares[whole]) for key, value in state.items()}
        for whole, state in _states(optimizer, shares).items()
    }
    _replace(optimizer, shares, states)


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are gathered as a unit, inner before outer.

    Routers are separate units: losses read their logits outside of the layer, and FSDP
    gathers a unit again when a gradient of its output arrives.
    """
    for component in COMPONENTS:
        for layer in getattr(getattr(model, component, None), "layers", ()):
            for module in layer.modules():
                if isinstance(module, MoEFFN):
                    yield cast(nn.Module, module.moe.router)
                    yield cast(nn.Module, module.moe.experts)
            yield layer


@contextmanager
def whole_parameters(
    model: nn.Module, optimizer: Optimizer | None = None, *, keep: bool = True
) -> Iterator[None]:
    """Give a model and its optimiser whole parameters for a while, to be saved.

    All processes have to enter; those that do not `keep` the whole need memory for one
    tensor at a time.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # evaluation leaves some units gathered
    places = _parameters(model)
    wholes: dict[Any, Any] = {}
    for share in dict.fromkeys(share for _, _, share in places):
        tensor = share.full_tensor().detach()
        wholes[share] = nn.Parameter(tensor, share.requires_grad) if keep else None
    before = _states(optimizer, wholes)
    states: dict[Any, dict[str, Any]] = {}
    for share, state in before.items():
        found = {key: _gathered(value) for key, value in state.items()}
        states[share] = found if keep else {}
    if not keep:
        yield
        return
    _set(places, wholes)
    _replace(optimizer, wholes, states)
    try:
        yield
    finally:
        _set(places, {share: share for share in wholes})
        shares = {whole: share for share, whole in wholes.items()}
        _replace(optimizer, shares, {wholes[s]: state for s, state in before.items()})


def _parameters(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """A shared parameter appears several times."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _set(places: Iterable[tuple[nn.Module, str, Any]], others: Mapping) -> None:
    for module, name, parameter in places:
        module._parameters[name] = others[parameter]


def _states(optimizer: Optimizer | None, parameters: Iterable[Any]) -> dict[Any, dict]:
    """State of the parameters that have any in the optimiser."""
    known = {} if optimizer is None else optimizer.state
    return {p: known[p] for p in parameters if known.get(p)}


def _replace(
    optimizer: Optimizer | None, others: Mapping[Any, Any], states: Mapping[Any, dict]
) -> None:
    """Replace the parameters of an optimiser, and their states, in place."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [others[parameter] for parameter in group["params"]]
    for parameter in states:
        del optimizer.state[parameter]
    for parameter, state in states.items():
        optimizer.state[others[parameter]] = state


def _gathered(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _shared(value: Any, share: DTensor) -> Any:
    """The rows of a moment that belong to a shard, split as `fully_shard` does."""
    if not isinstance(value, Tensor) or value.shape != share.shape:
        return value
    rows, rank = value.chunk(share.device_mesh.size()), distributed.get_rank()
    return DTensor.from_local(
        (rows[rank] if rank < len(rows) else value[:0]).clone(),
        share.device_mesh,
        share.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
