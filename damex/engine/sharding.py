"""Runner for sharded detectors: experts over processes, or all parameters (FSDP2).

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
from functools import partial
from typing import Any, cast

from mmengine.device import get_device
from mmengine.hooks import EMAHook
from mmengine.model import is_model_wrapper
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from mmengine.runner import Runner
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from damex.engine.hooks import ExpertMeanDecayHook, bare_model
from damex.engine.optimizer_state import optimizer_of, parameter_names
from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.sites import COMPONENTS
from damex.moe import ExpertGradients, gathered_experts, sharded_layers, sharded_names

FULLY_SHARDED = "FullySharded"


class ShardedRunner(Runner):
    """mmengine's Runner, unchanged if no parameter is sharded."""

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Wrap the model; DDP neither copies nor averages sharded experts."""
        names = [] if is_model_wrapper(model) else sharded_names(model)
        if names:
            _check_wrapper(model_wrapper_cfg or {})
            # torch has no public alternative.
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                model, names
            )
        if self._is_fully_sharded:
            return model.to(get_device())  # sharded once weights are loaded
        return super().wrap_model(model_wrapper_cfg, model)

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Build the wrapper; it reduces the gradients of sharded experts."""
        wrapper = super().build_optim_wrapper(optim_wrapper)
        if wrapper is optim_wrapper:
            return wrapper
        model, optimizer = bare_model(self), optimizer_of(wrapper)
        if optimizer is not None:
            parameter_names(model, optimizer)  # fails before the first step, if at all
        if sharded_layers(model):
            reduce_before_steps(wrapper, ExpertGradients(model))
        return wrapper

    def train(self) -> nn.Module:
        """Train; ConfigError if a setting cannot be combined with sharding."""
        self._check_sharding("val_dataloader")
        return super().train()

    def test(self) -> dict:
        """Evaluate on the test data; ConfigError as for `train`."""
        self._check_sharding("test_dataloader")
        return super().test()

    def load_or_resume(self) -> None:
        """Load or resume as configured, with whole experts and moments."""
        if self._has_loaded or not (self._resume or self._load_from):
            super().load_or_resume()
        else:
            with self._whole_experts():
                super().load_or_resume()
        if self._is_fully_sharded and not isinstance(self.model, FSDPModule):
            shard_fully(self.model, self._optimizer)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save the whole; called on every process, written by the first."""
        keep, whole = self.rank == 0, self._whole_experts
        if isinstance(self.model, FSDPModule):
            whole = partial(whole_parameters, bare_model(self), self._optimizer)
        with whole(keep=keep):
            super().save_checkpoint(*args, **kwargs)

    def _init_model_weights(self) -> None:
        """Draw whole experts, as mmengine broadcasts the first process's weights."""
        with self._whole_experts():
            super()._init_model_weights()

    def _check_sharding(self, loader: str) -> None:
        """Reject settings that need whole parameters or let a process wait forever."""
        model, sharding = bare_model(self), "moe.expert_parallel"
        hooks: tuple[type, ...] = (ExpertMeanDecayHook,)
        layers = sharded_layers(model)
        faults: dict[str, Any] = {}
        if self._is_fully_sharded:
            sharding = f"model_wrapper_cfg.type={FULLY_SHARDED!r}"
            hooks += (EMAHook,)
            constructor = (self.cfg.get("optim_wrapper") or {}).get("constructor")
            faults = {
                "sync_bn": self.cfg.get("sync_bn"),
                "train_only": self.cfg.get("train_only"),
                "optim_wrapper.constructor": constructor,
                "moe.upcycling or moe.router_warmup": getattr(
                    model, "trains_in_stages", False
                ),
                "moe.expert_parallel": layers,
            }
        elif not layers:
            return
        sampler = (self.cfg.get(loader) or {}).get("sampler") or {}
        faults[f"{loader}.sampler.round_up=False"] = sampler.get("round_up") is False
        faults |= {type(h).__name__: True for h in self.hooks if isinstance(h, hooks)}
        for name, is_set in faults.items():
            if is_set:
                raise ConfigError(
                    f"{name} cannot be combined with {sharding}: a process has only a "
                    "part of the parameters, and all processes have to take part in "
                    "each batch; leave one of the two out."
                )

    def _whole_experts(self, *, keep: bool = True) -> AbstractContextManager[None]:
        averages = [
            hook.ema_model.module
            for hook in self.hooks
            if isinstance(hook, EMAHook) and hasattr(hook, "ema_model")
        ]
        models = [bare_model(self), *averages]
        return gathered_experts(models, self._optimizer, keep=keep)

    @property
    def _is_fully_sharded(self) -> bool:
        wrapper = self.cfg.get("model_wrapper_cfg") or {}
        return self.distributed and wrapper.get("type") == FULLY_SHARDED

    @property
    def _optimizer(self) -> Optimizer | None:
        return optimizer_of(self.optim_wrapper)


def reduce_before_steps(wrapper: OptimWrapper, gradients: ExpertGradients) -> None:
    """Make a wrapper reduce sharded experts' gradients before clipping or stepping.

    Raises:
        ConfigError: If the wrapper is not a single OptimWrapper, or could step on one
            process and skip on another.
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if not isinstance(wrapper, OptimWrapper):
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


def _check_wrapper(config: Mapping[str, Any]) -> None:
    kind = config.get("type", "MMDistributedDataParallel")
    kind = MODEL_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    if not (isinstance(kind, type) and issubclass(kind, DistributedDataParallel)):
        raise ConfigError(
            "moe.expert_parallel needs DDP for all other parameters, and "
            f"model_wrapper_cfg.type is {config.get('type')!r}; leave "
            "model_wrapper_cfg out, or set moe.expert_parallel=1."
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
