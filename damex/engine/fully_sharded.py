"""Fully sharded training: ``model_wrapper_cfg=dict(type="FullySharded")``.

Every process keeps a share of each parameter, of its gradient and of its moments. The
whole of a unit (a layer of the transformer, a bank of experts) is gathered when it is
computed, and given up again: FSDP2, ``torch.distributed.fsdp.fully_shard`` (Zhao et
al. 2023, arXiv 2304.11277). Weights are drawn and loaded before they are shared out,
and saved as a whole, so that checkpoints do not know how many processes there were.
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
    """Whether processes have shared the parameters of a model out."""
    return isinstance(model, FSDPModule)


def check_config(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Refuse what needs whole parameters in a training.

    Args:
        model: The detector.
        config: Of the training.

    Raises:
        ConfigError: If there is any.
    """
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
    """Share the parameters of a detector out among all processes.

    Args:
        model: With the same weights on all processes; changed in place.
        optimizer: Of the model; it goes on with the shares, and those of its state.
    """
    places = _parameters(model)
    for _, _, parameter in places:
        parameter.data = parameter.data.contiguous()  # FSDP takes no channels-last
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
    """What is gathered at a time, the inner before the outer.

    Routers are units of their own: losses read their logits past the layer that they
    belong to, and FSDP gathers a unit again when a gradient of its output comes.
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
    """Give a model its whole parameters for a while, to be saved.

    Args:
        model: Its parameters are shared out.
        optimizer: Of the model; its state becomes whole, too.
        keep: Whether this process needs them. All processes have to enter, but those
            that do not keep the whole need memory for one tensor at a time.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation some are whole
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
    """Modules, names and parameters; a parameter may stand in several places."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _set(places: Iterable[tuple[nn.Module, str, Any]], others: Mapping) -> None:
    """Put other parameters in the places of a model's."""
    for module, name, parameter in places:
        module._parameters[name] = others[parameter]


def _states(optimizer: Optimizer | None, parameters: Iterable[Any]) -> dict[Any, dict]:
    """What an optimiser knows of parameters, where it knows anything."""
    known = {} if optimizer is None else optimizer.state
    return {p: known[p] for p in parameters if known.get(p)}


def _replace(
    optimizer: Optimizer | None, others: Mapping[Any, Any], states: Mapping[Any, dict]
) -> None:
    """Put other parameters in the places of an optimiser's.

    Args:
        optimizer: Changed in place.
        others: By parameter what shall stand there.
        states: By parameter the state of what shall stand there.
    """
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
    """The rows of a moment that go with a share, as `fully_shard` deals them out."""
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
