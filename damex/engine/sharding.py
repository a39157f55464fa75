"""Sharded detectors: experts over processes, or all parameters (FSDP2).

With ``moe.expert_parallel`` experts are distributed over processes: DDP ignores them,
and their gradients are summed and clipped over the processes.
``model_wrapper_cfg=dict(type="FullySharded")`` is FSDP2,
``torch.distributed.fsdp.fully_shard`` (Zhao et al. 2023, arXiv 2304.11277): every
process keeps a shard of each parameter, gradient and moment; a unit (a transformer
layer, a bank of experts) is gathered while it is computed. In both cases weights are
drawn, loaded and saved as a whole, so checkpoints do not depend on the number of
processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from mmengine.device import get_device
from mmengine.hooks import EMAHook
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from mmengine.runner import Runner
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from damex.engine.hooks import ExpertMeanDecayHook, bare_model, models_of
from damex.engine.optimizer_state import optimizer_of, parameter_names
from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.sites import COMPONENTS
from damex.moe import ExpertGradients, gathered_experts, sharded_layers, sharded_names

DDP, FULLY_SHARDED = "MMDistributedDataParallel", "FullySharded"
DEFAULT = "DefaultOptimWrapperConstructor"


def wrapper_config(
    config: dict[str, Any] | None, model: nn.Module, cfg: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Complete the ``model_wrapper_cfg`` of several processes: damex's DDP by default.

    Wrappers of other types are left as they are.
    """
    wrapper = dict(broadcast_buffers=False) if config is None else config
    if wrapper.get("type", DDP) != DDP:
        return config
    # Some parameters have no gradient in each stage.
    in_stages = getattr(model, "trains_in_stages", False)
    unused = in_stages or cfg.get("find_unused_parameters", False)
    defaults: dict[str, Any] = dict(type=DDP, find_unused_parameters=unused)
    if get_device() == "cpu":
        defaults["device_ids"] = None
    return {**defaults, **wrapper}


def exclude_from_ddp(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Let DDP neither copy nor average sharded experts; ConfigError without DDP."""
    names = sharded_names(model)
    if not names:
        return
    kind = config.get("type", DDP)
    kind = MODEL_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    if not (isinstance(kind, type) and issubclass(kind, DistributedDataParallel)):
        raise ConfigError(
            "moe.expert_parallel needs DDP for all other parameters, and "
            f"model_wrapper_cfg.type is {config.get('type')!r}; leave "
            "model_wrapper_cfg out, or set moe.expert_parallel=1."
        )
    # torch has no public alternative.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def is_fully_sharded(runner: Runner) -> bool:
    """Whether FSDP shards, or is going to shard, the parameters."""
    wrapper = runner.cfg.get("model_wrapper_cfg") or {}
    return runner.distributed and wrapper.get("type") == FULLY_SHARDED


def check_sharding(runner: Runner, loader: str) -> None:
    """Reject settings that need whole parameters or let a process wait forever."""
    model, sharding = bare_model(runner), "moe.expert_parallel"
    hooks: tuple[type, ...] = (ExpertMeanDecayHook,)
    layers = sharded_layers(model)
    problems: dict[str, Any] = {}
    if is_fully_sharded(runner):
        sharding = f"model_wrapper_cfg.type={FULLY_SHARDED!r}"
        hooks += (EMAHook,)
        own = (runner.cfg.get("optim_wrapper") or {}).get("constructor")
        in_stages = getattr(model, "trains_in_stages", False)
        problems = {
            "sync_bn": runner.cfg.get("sync_bn"),
            "train_only": runner.cfg.get("train_only"),
            f"optim_wrapper.constructor={own!r}": own not in (None, DEFAULT),
            "moe.upcycling or moe.router_warmup": in_stages,
            "moe.expert_parallel": layers,
        }
    elif not layers:
        return
    sampler = (runner.cfg.get(loader) or {}).get("sampler") or {}
    problems[f"{loader}.sampler.round_up=False"] = sampler.get("round_up") is False
    problems |= {type(h).__name__: True for h in runner.hooks if isinstance(h, hooks)}
    for name, is_set in problems.items():
        if is_set:
            raise ConfigError(
                f"{name} cannot be combined with {sharding}: a process has only a "
                "part of the parameters, and all processes have to take part in "
                "each batch; leave one of the two out."
            )


def whole_experts(runner: Runner, *, keep: bool = True) -> AbstractContextManager[None]:
    """Gather sharded experts, their averages and their moments for a while."""
    optimizer = optimizer_of(runner.optim_wrapper)
    return gathered_experts(models_of(runner), optimizer, keep=keep)


def whole_detector(runner: Runner) -> AbstractContextManager[None]:
    """Gather all that a process has a part of, to be saved by the first process."""
    keep = runner.rank == 0
    if isinstance(runner.model, FSDPModule):
        optimizer = optimizer_of(runner.optim_wrapper)
        return whole_parameters(bare_model(runner), optimizer, keep=keep)
    return whole_experts(runner, keep=keep)


def prepare_optimizer(model: nn.Module, wrapper: Any) -> None:
    """Check an optimizer's parameters; reduce the gradients of sharded experts."""
    optimizer = optimizer_of(wrapper)
    if optimizer is not None:
        parameter_names(model, optimizer)  # fails before the first step, if at all
    if sharded_layers(model):
        reduce_before_steps(wrapper, ExpertGradients(model))


def reduce_before_steps(wrapper: OptimWrapper, gradients: ExpertGradients) -> None:
    """Make a wrapper reduce sharded experts' gradients before clipping or stepping.

    Raises:
        ConfigError: If the wrapper is not a single OptimWrapper, or could step on one
            process and skip on another.
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if optimizer_of(wrapper) is None:
        raise ConfigError(
            f"moe.expert_parallel needs one optim_wrapper, got {type(wrapper).__name__}"
            "; set optim_wrapper.type='OptimWrapper', or moe.expert_parallel=1."
        )
    is_amp = isinstance(wrapper, AmpOptimWrapper)
    if is_amp and not isinstance(wrapper.loss_scaler, ShardedGradScaler):
        raise ConfigError(
            "moe.expert_parallel with AmpOptimWrapper: a gradient that overflows in "
            "the experts of one process has to stop the step of all processes; set "
            "optim_wrapper.use_fsdp=True, which synchronizes the gradient scaler."
        )
    if not wrapper.clip_grad_kwargs:
        wrapper.optimizer.register_step_pre_hook(lambda *call: gradients.reduce())
        return
    clip = wrapper.clip_func
    if wrapper.grad_name == "grad_norm":
        clip = gradients.clip_grad_norm

    def reduce_and_clip(parameters: list[Any], **kwargs: Any) -> Any:
        gradients.reduce()
        return clip(parameters, **kwargs)

    wrapper.clip_func = reduce_and_clip


def shard_fully(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Shard the parameters of a detector, in place, and its optimizer with its state.

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
    states = _states(optimizer, shares)
    for whole, state in states.items():
        share = shares[whole]
        states[whole] = {
            key: distribute_tensor(value, share.device_mesh, share.placements)
            if isinstance(value, Tensor) and value.shape == share.shape
            else value
            for key, value in state.items()
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
    """Give a model and its optimizer whole parameters for a while, to be saved.

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
        found = {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in state.items()
        }
        states[share] = found if keep else {}
    if not keep:
        yield
        return
    for module, name, share in places:
        module._parameters[name] = wholes[share]
    _replace(optimizer, wholes, states)
    try:
        yield
    finally:
        for module, name, share in places:
            module._parameters[name] = share
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


def _states(optimizer: Optimizer | None, parameters: Iterable[Any]) -> dict[Any, dict]:
    """State of the parameters that have any in the optimizer."""
    known = {} if optimizer is None else optimizer.state
    return {p: known[p] for p in parameters if known.get(p)}


def _replace(
    optimizer: Optimizer | None, others: Mapping[Any, Any], states: Mapping[Any, dict]
) -> None:
    """Replace the parameters of an optimizer, and their states, in place."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [others[parameter] for parameter in group["params"]]
    for parameter in states:
        del optimizer.state[parameter]
    for parameter, state in states.items():
        optimizer.state[others[parameter]] = state
