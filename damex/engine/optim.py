"""A separate optimiser for the experts, and learning rate restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mmengine.model import is_model_wrapper
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.param_scheduler import _ParamScheduler
from mmengine.registry import (
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
)
from torch import nn
from torch.optim import Optimizer

from damex.errors import ConfigError, did_you_mean
from damex.moe import ChainedOptimizer, NormalizedGD, expert_parameters

OPTIMIZERS.register_module(module=NormalizedGD)
HINT = "experts=dict(type='NormalizedGD', lr=0.001)"


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class ExpertOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Train experts with one optimiser and all other parameters with another.

    Algorithm 1 of Chen et al. 2022 (arXiv 2208.02813) as a config::

        optim_wrapper = dict(
            constructor='ExpertOptimWrapperConstructor',
            optimizer=dict(type='AdamW', lr=0.0001),
            experts=dict(type='NormalizedGD', lr=0.001),
        )

    Both are chained into one optimiser, so the wrapper's type, ``clip_grad`` and
    checkpoints work unchanged, and a ``param_scheduler`` scales both learning rates by
    the same factors (an absolute ``eta_min`` applies to both). The clipping norm
    includes the experts' gradients, but does not change the length of a normalised
    step.

    ``paramwise_cfg`` applies to the other parameters. Of it, only a ``lr_mult`` of
    ``custom_keys`` that covers a whole bank of experts reaches the experts.
    """

    def __init__(
        self,
        optim_wrapper_cfg: dict[str, Any],
        paramwise_cfg: dict[str, Any] | None = None,
    ) -> None:
        wrapper = dict(optim_wrapper_cfg)
        self.experts_cfg = _check_experts(wrapper.pop("experts", None))
        super().__init__(wrapper, paramwise_cfg)

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Build the wrapper with its optimiser for a model.

        Raises:
            ConfigError: If the model is dense, all experts are frozen, or the
                parameters of a bank get different factors.
        """
        bare = cast(nn.Module, model.module) if is_model_wrapper(model) else model
        try:
            banks, others = expert_parameters(bare)
        except ValueError as error:
            raise ConfigError(
                "optim_wrapper.experts: the detector is dense (moe=None); leave out "
                "optim_wrapper.constructor and experts, or choose a moe."
            ) from error
        banks = list(filter(None, map(_trained, banks)))
        if not banks:
            raise ConfigError(
                "optim_wrapper.experts: all experts are frozen; leave out "
                "optim_wrapper.constructor and experts."
            )
        groups = [dict(params=[p for p in others if p.requires_grad])]
        if not self.paramwise_cfg:
            expert_groups = [dict(bank, lr=self.experts_cfg["lr"]) for bank in banks]
        else:
            groups, expert_groups = self._paramwise(bare, banks)
        optimizer = ChainedOptimizer(
            _build(self.optimizer_cfg, groups, "optimizer"),
            _build(self.experts_cfg, expert_groups, "experts"),
        )
        wrapper = {"type": "OptimWrapper", **self.optim_wrapper_cfg}
        return OPTIM_WRAPPERS.build(wrapper, default_args=dict(optimizer=optimizer))

    def _paramwise(
        self, model: nn.Module, banks: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Apply ``paramwise_cfg``; return groups of other parameters and of experts."""
        groups: list[dict[str, Any]] = []
        self.add_params(groups, model)  # one per trainable parameter
        by_id = {id(group["params"][0]): group for group in groups}
        names = {id(p): name for name, p in model.named_parameters()}
        expert_groups = []
        for bank in banks:
            own = [by_id.pop(id(p)) for p in bank["params"]]
            lr = self.experts_cfg["lr"] * self._factor(own, names)
            expert_groups.append(dict(bank, lr=lr))
        return list(by_id.values()), expert_groups

    def _factor(self, groups: list[dict[str, Any]], names: Mapping[int, str]) -> float:
        """Return the common ``lr_mult`` of a bank of experts."""
        factors = {group.get("lr_mult", 1.0) for group in groups}
        if len(factors) > 1:
            found = [names[id(group["params"][0])] for group in groups]
            raise ConfigError(
                "optim_wrapper.paramwise_cfg.custom_keys give the parameters of one "
                f"bank of experts different factors {sorted(factors)}: "
                f"{', '.join(found)}; cover all of them or none."
            )
        return factors.pop()


@PARAM_SCHEDULERS.register_module()
class ResetLR(LRSchedulerMixin, _ParamScheduler):
    """Reset the learning rate to that of the optimiser's config, once, at `begin`.

    mmengine's schedulers multiply the current value, so that a second warm-up would
    only rise to the end of the first decay. Put this one before them in
    ``param_scheduler``::

        dict(type='ResetLR', by_epoch=False, begin=0.5),
        dict(type='LinearLR', start_factor=0.05, by_epoch=False, begin=0.5, end=0.55),
        dict(type='CosineAnnealingLR', by_epoch=False, begin=0.5),
    """

    def _get_value(self) -> list[float]:
        if self.last_step == 0:
            return list(self.base_values)
        return [group[self.param_name] for group in self.optimizer.param_groups]


def check_optimizer_type(config: Mapping[str, Any], field: str) -> None:
    """Raise ConfigError if the type of ``optim_wrapper[field]`` is not registered."""
    kind = config.get("type")
    if isinstance(kind, str) and OPTIMIZERS.get(kind) is None:
        raise ConfigError(
            f"optim_wrapper.{field} has the unknown type {kind!r}; "
            f"{did_you_mean(kind, sorted(OPTIMIZERS.module_dict))}"
        )


def _trained(bank: Mapping[str, Any]) -> dict[str, Any] | None:
    """Drop frozen parameters from a bank of experts; None if all are frozen."""
    parameters = [p for p in bank["params"] if p.requires_grad]
    return {**bank, "params": parameters} if parameters else None


def _check_experts(config: Any) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise ConfigError(
            "optim_wrapper.constructor='ExpertOptimWrapperConstructor' needs "
            f"optim_wrapper.experts, for instance {HINT}; got {config!r}."
        )
    check_optimizer_type(config, "experts")
    lr: Any = config.get("lr")
    if config.get("type") is None or type(lr) not in (int, float) or lr < 0:
        raise ConfigError(
            "optim_wrapper.experts needs a type and a learning rate lr of 0 or more, "
            f"for instance {HINT}; got {dict(config)!r}."
        )
    return dict(config)


def _build(
    config: Mapping[str, Any], groups: list[dict[str, Any]], field: str
) -> Optimizer:
    try:
        return OPTIMIZERS.build({**config, "params": groups})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim_wrapper.{field} = {dict(config)}: {error}") from error
