"""A runner for experts that are spread over processes (``moe.expert_parallel``).

What differs from mmengine: DDP leaves the experts alone, their gradients are summed and
clipped over the processes, and whatever draws, loads or saves weights sees all experts,
so that checkpoints do not know how many processes there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from mmengine.hooks import EMAHook
from mmengine.model import is_model_wrapper
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from damex.engine.schedule import ExpertMeanDecayHook, bare_model
from damex.errors import ConfigError
from damex.moe import ExpertGradients, sharded_layers, sharded_names, whole_experts


class ExpertParallelRunner(Runner):
    """mmengine's Runner; without spread experts it is exactly that."""

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Wrap the model; DDP neither copies nor averages experts that are spread."""
        names = [] if is_model_wrapper(model) else sharded_names(model)
        if names:
            _check_wrapper(model_wrapper_cfg or {})
            # How DDP is told; torch itself has no other way yet.
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                model, names
            )
        return super().wrap_model(model_wrapper_cfg, model)

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Build the wrapper; it reduces the gradients of spread experts."""
        wrapper = super().build_optim_wrapper(optim_wrapper)
        model = bare_model(self)
        if wrapper is not optim_wrapper and sharded_layers(model):
            reduce_before_steps(wrapper, ExpertGradients(model))
        return wrapper

    def train(self) -> nn.Module:
        """Train as configured; see mmengine.

        Raises:
            ConfigError: If something would need the experts of other processes, or
                processes would get different numbers of batches.
        """
        if sharded_layers(bare_model(self)):
            _check_hooks(self.hooks)
            _check_loader(self.cfg.get("val_dataloader"), "val_dataloader")
        return super().train()

    def test(self) -> dict:
        """Evaluate on the test data; see mmengine.

        Raises:
            ConfigError: If processes would get different numbers of batches.
        """
        if sharded_layers(bare_model(self)):
            _check_loader(self.cfg.get("test_dataloader"), "test_dataloader")
        return super().test()

    def load_or_resume(self) -> None:
        """Load or resume as configured, experts and their moments as a whole."""
        if self._has_loaded or not (self._resume or self._load_from):
            super().load_or_resume()
            return
        with self._whole_experts():
            super().load_or_resume()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save all experts; every process calls this, and the first one writes."""
        with self._whole_experts(keep=self.rank == 0):
            super().save_checkpoint(*args, **kwargs)

    def _init_model_weights(self) -> None:
        """Draw all experts, as a single process would.

        mmengine then sends the weights of the first process to all others, which would
        give each of them the same experts.
        """
        with self._whole_experts():
            super()._init_model_weights()

    def _whole_experts(self, *, keep: bool = True) -> AbstractContextManager[None]:
        averages = [
            hook.ema_model.module
            for hook in self.hooks
            if isinstance(hook, EMAHook) and hasattr(hook, "ema_model")
        ]
        wrapper = self.optim_wrapper
        optimizer = wrapper.optimizer if isinstance(wrapper, OptimWrapper) else None
        return whole_experts([bare_model(self), *averages], optimizer, keep=keep)


def reduce_before_steps(wrapper: OptimWrapper, gradients: ExpertGradients) -> None:
    """Have a wrapper reduce the gradients of spread experts once before each step.

    That is before they are clipped, or else by the optimiser itself.

    Args:
        wrapper: Changed in place.
        gradients: Of the model that it trains.

    Raises:
        ConfigError: If it is none of mmengine's usual two, or could make a step on one
            process and skip it on another.
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
    """Whether a gradient scaler skips a step where any process would."""
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


def _check_hooks(hooks: list[Any]) -> None:
    if any(isinstance(hook, ExpertMeanDecayHook) for hook in hooks):
        raise ConfigError(
            "ExpertMeanDecayHook needs the mean of all experts, and with "
            "moe.expert_parallel no process has them; leave one of the two out."
        )


def _check_loader(loader: Any, field: str) -> None:
    """Refuse evaluation where one process would wait for another's tokens for ever."""
    sampler = (loader or {}).get("sampler") if isinstance(loader, Mapping) else None
    if isinstance(sampler, Mapping) and sampler.get("round_up") is False:
        raise ConfigError(
            f"{field}.sampler.round_up=False gives processes different numbers of "
            "images, and with moe.expert_parallel all have to take part in each batch; "
            "leave round_up out."
        )
