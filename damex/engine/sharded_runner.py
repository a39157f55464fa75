"""Runner for sharded detectors (expert parallel or FSDP2).

With ``moe.expert_parallel`` experts are distributed over processes: DDP ignores them,
and their gradients are summed and clipped over the processes. With FSDP2 all parameters
are sharded (:mod:`damex.engine.fully_sharded`). Weights are drawn, loaded and saved as
a whole, so checkpoints do not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from mmengine.device import get_device
from mmengine.hooks import EMAHook
from mmengine.model import is_model_wrapper
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from damex.engine.fully_sharded import (
    FULLY_SHARDED,
    check_config,
    is_fully_sharded,
    shard_fully,
    whole_parameters,
)
from damex.engine.schedule import ExpertMeanDecayHook, bare_model
from damex.errors import ConfigError
from damex.moe import (
    ExpertGradients,
    gathered_experts,
    sharded_layers,
    sharded_names,
)


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
        if self._asks_for_sharding:
            check_config(model, self.cfg)
            return model.to(get_device())  # sharded once weights are loaded
        return super().wrap_model(model_wrapper_cfg, model)

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Build the wrapper; it reduces the gradients of sharded experts."""
        wrapper = super().build_optim_wrapper(optim_wrapper)
        model = bare_model(self)
        if wrapper is not optim_wrapper and sharded_layers(model):
            reduce_before_steps(wrapper, ExpertGradients(model))
        return wrapper

    def train(self) -> nn.Module:
        """Train; ConfigError if a hook or the validation data cannot be sharded."""
        if sharded_layers(bare_model(self)):
            needs, where = "the mean of all experts", "moe.expert_parallel"
            _check_hooks(self.hooks, (ExpertMeanDecayHook,), needs=needs, where=where)
        if self._asks_for_sharding:
            kinds = (EMAHook, ExpertMeanDecayHook)
            needs, where = "whole parameters", f"model_wrapper_cfg.type={FULLY_SHARDED}"
            _check_hooks(self.hooks, kinds, needs=needs, where=where)
        self._check_loader("val_dataloader")
        return super().train()

    def test(self) -> dict:
        """Evaluate on the test data; ConfigError if processes' batches differ."""
        self._check_loader("test_dataloader")
        return super().test()

    def load_or_resume(self) -> None:
        """Load or resume as configured, with whole experts and moments."""
        if self._has_loaded or not (self._resume or self._load_from):
            super().load_or_resume()
        else:
            with self._whole_experts():
                super().load_or_resume()
        if self._asks_for_sharding and not is_fully_sharded(self.model):
            shard_fully(self.model, self._optimizer)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save the whole; called on every process, written by the first."""
        keep, whole = self.rank == 0, self._whole_experts
        if is_fully_sharded(self.model):
            whole = partial(whole_parameters, self.model, self._optimizer)
        with whole(keep=keep):
            super().save_checkpoint(*args, **kwargs)

    def _init_model_weights(self) -> None:
        """Draw whole experts, as mmengine broadcasts the first process's weights."""
        with self._whole_experts():
            super()._init_model_weights()

    def _check_loader(self, field: str) -> None:
        """Reject evaluation in which a process would wait forever for another."""
        is_sharded = self._asks_for_sharding
        reason = "a fully sharded model" if is_sharded else "moe.expert_parallel"
        if not (is_sharded or sharded_layers(bare_model(self))):
            return
        loader = self.cfg.get(field)
        sampler = loader.get("sampler") if isinstance(loader, Mapping) else None
        if isinstance(sampler, Mapping) and sampler.get("round_up") is False:
            raise ConfigError(
                f"{field}.sampler.round_up=False gives processes different numbers of "
                f"images, and with {reason} all have to take part in each batch; leave "
                "round_up out."
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
    def _asks_for_sharding(self) -> bool:
        wrapper = self.cfg.get("model_wrapper_cfg") or {}
        return self.distributed and wrapper.get("type") == FULLY_SHARDED

    @property
    def _optimizer(self) -> Optimizer | None:
        wrapper = self.optim_wrapper
        return wrapper.optimizer if isinstance(wrapper, OptimWrapper) else None


def reduce_before_steps(wrapper: OptimWrapper, gradients: ExpertGradients) -> None:
    """Make a wrapper reduce sharded experts' gradients before clipping or stepping.

    Raises:
        ConfigError: If the wrapper is not a single OptimWrapper, or could step on one
            process and skip on another.
    """
    if not isinstance(wrapper, OptimWrapper):
        raise ConfigError(
            f"moe.expert_parallel needs one optim_wrapper, got {type(wrapper).__name__}"
            "; set optim_wrapper.type='OptimWrapper', or moe.expert_parallel=1."
        )
    if isinstance(wrapper, AmpOptimWrapper) and not _asks_all(wrapper.loss_scaler):
        raise ConfigError(
            "moe.expert_parallel with AmpOptimWrapper: a gradient that overflows in "
            "the experts of one process has to stop the step of all processes; set "
            "optim_wrapper.use_fsdp=True, with which mmengine's gradient scaler asks "
            "all of them."
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


def _asks_all(scaler: Any) -> bool:
    """Whether a gradient scaler skips a step if any process would."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return isinstance(scaler, ShardedGradScaler)


def _check_wrapper(config: Mapping[str, Any]) -> None:
    kind = config.get("type", "MMDistributedDataParallel")
    kind = MODEL_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    if not (isinstance(kind, type) and issubclass(kind, DistributedDataParallel)):
        raise ConfigError(
            "moe.expert_parallel needs DDP for all that is no expert, and "
            f"model_wrapper_cfg.type is {config.get('type')!r}; leave "
            "model_wrapper_cfg out, or set moe.expert_parallel=1."
        )


def _check_hooks(
    hooks: list[Any], kinds: tuple[type, ...], *, needs: str, where: str
) -> None:
    """Reject hooks that need more than a process has."""
    for hook in hooks:
        if isinstance(hook, kinds):
            raise ConfigError(
                f"{type(hook).__name__} needs {needs}, and with {where} no process has "
                "them; leave one of the two out."
            )
