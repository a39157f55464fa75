"""The optimizer of the experts, learning rates, and the length of a training."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import mmdet.registry
from mmengine.config import Config, ConfigDict
from mmengine.model import is_model_wrapper
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper, _ParamScheduler
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.registry import (
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    Registry,
)
from torch import nn
from torch.optim import Optimizer

from damex.errors import ConfigError, did_you_mean
from damex.moe import ChainedOptimizer, Muon, NormalizedGD, expert_parameters

OPTIMIZERS.register_module(module=NormalizedGD)
# Of mmdet's detectors and of those of Transformers.
LAYER = re.compile(r"\b(encoder|decoder)\..*?\blayers\.\d+\.\w+\.")
LOOPS = (None, "EpochBasedTrainLoop", "IterBasedTrainLoop")  # of mmengine


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class ExpertOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Train experts with one optimizer and all other parameters with another.

    Algorithm 1 of Chen et al. 2022 (arXiv 2208.02813) as a config::

        optim_wrapper = dict(
            constructor='ExpertOptimWrapperConstructor',
            optimizer=dict(type='AdamW', lr=0.0001),
            experts=dict(type='NormalizedGD', lr=0.001),
        )

    Both are chained into one optimizer, so the wrapper's type, ``clip_grad`` and
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
        """Build the wrapper with its optimizer for a model.

        Raises:
            ConfigError: If the model is dense, all experts are frozen, or the
                parameters of a bank get different factors.
        """
        bare = cast(nn.Module, model.module) if is_model_wrapper(model) else model
        try:
            banks, others = expert_parameters(bare)
        except ValueError:  # a dense detector
            banks, others = [], []
        for bank in banks:
            bank["params"] = [p for p in bank["params"] if p.requires_grad]
        banks = [bank for bank in banks if bank["params"]]
        if not banks:
            raise ConfigError(
                "optim_wrapper.experts: the detector is dense (moe=None) or all its "
                "experts are frozen; leave out optim_wrapper.constructor and experts, "
                "or choose a moe."
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
            found = {
                names[id(p)]: by_id.pop(id(p)).get("lr_mult", 1.0)
                for p in bank["params"]
            }
            if len({*found.values()}) > 1:
                raise ConfigError(
                    "optim_wrapper.paramwise_cfg.custom_keys give the parameters of "
                    f"one bank of experts different factors {found}; cover all of them "
                    "or none."
                )
            factor = next(iter(found.values()))
            expert_groups.append(dict(bank, lr=self.experts_cfg["lr"] * factor))
        return list(by_id.values()), expert_groups


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class MuonOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Train attention and FFNs with Muon, all other parameters as configured.

    In a config::

        optim_wrapper = dict(
            constructor='MuonOptimWrapperConstructor',
            optimizer=dict(type='AdamW', lr=0.0016, weight_decay=0.05),
        )

    :class:`damex.moe.Muon` gets the matrices of the layers of encoder and decoder, of
    experts too but not of routers, with the learning rates and weight decays of the
    config and ``paramwise_cfg``. The rest, such as heads, embeddings, biases and the
    backbone, keeps the ``optimizer``.
    """

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Build the wrapper; its optimizer is the one of the config and then Muon.

        Raises:
            ConfigError: If the detector has no such matrices.
        """
        wrapper = super().__call__(model)
        bare = cast(nn.Module, model.module) if is_model_wrapper(model) else model
        chosen = {id(p) for name, p in bare.named_parameters() if _is_matrix(name, p)}
        groups, others = [], []
        for group in wrapper.optimizer.param_groups:
            params = group["params"]
            if mine := [p for p in params if id(p) in chosen]:
                rates = {k: group[k] for k in ("lr", "weight_decay") if k in group}
                groups.append(dict(params=mine, **rates))
            if rest := [p for p in params if id(p) not in chosen]:
                others.append({**group, "params": rest})
        if not groups:
            raise ConfigError(
                "optim_wrapper.constructor='MuonOptimWrapperConstructor': the detector "
                "has no matrix in layers of an encoder or decoder; leave it out."
            )
        wrapper.optimizer.param_groups = others
        wrapper.optimizer = ChainedOptimizer(wrapper.optimizer, Muon(groups))
        return wrapper


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a weight of attention or an FFN; of experts, a bank of weights."""
    axes = 3 if ".moe." in name else 2
    is_own = parameter.dim() == axes and "backbone." not in name
    return is_own and LAYER.search(name) is not None


@PARAM_SCHEDULERS.register_module()
class ResetLR(LRSchedulerMixin, _ParamScheduler):
    """Reset the learning rate to that of the optimizer's config, once, at `begin`.

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


def check_type(kind: Any, known: Registry, place: str) -> None:
    """Raise ConfigError if ``optim_wrapper.<place>`` is in no registry of mmdet."""
    if isinstance(kind, str) and known.get(kind) is None:
        names = sorted({**known.module_dict, **known.root.module_dict})
        raise ConfigError(
            f"optim_wrapper.{place} has the unknown type {kind!r}; "
            f"{did_you_mean(kind, names)}"
        )


def _check_experts(config: Any) -> dict[str, Any]:
    lr: Any = config.get("lr") if isinstance(config, Mapping) else None
    if type(lr) not in (int, float) or lr < 0 or config.get("type") is None:
        raise ConfigError(
            "optim_wrapper.constructor='ExpertOptimWrapperConstructor' needs "
            "optim_wrapper.experts with a type and a learning rate lr of 0 or more, "
            f"such as dict(type='NormalizedGD', lr=0.001), got {config!r}."
        )
    check_type(config["type"], mmdet.registry.OPTIMIZERS, "experts")
    return dict(config)


def _build(
    config: Mapping[str, Any], groups: list[dict[str, Any]], field: str
) -> Optimizer:
    try:
        return OPTIMIZERS.build({**config, "params": groups})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim_wrapper.{field} = {dict(config)}: {error}") from error


def set_length(cfg: Config | ConfigDict) -> None:
    """Move the top-level ``max_epochs`` or ``max_iters`` into ``train_cfg``, in place.

    The checkpoints and logs of an iteration-based training count iterations, too.

    Raises:
        ConfigError: If mmengine's loop counts the other one, or its epoch is without
            end; custom loops may differ.
    """
    train = cfg.get("train_cfg")
    if not train:
        return
    key = length_key(train)
    other = "max_epochs" if key == "max_iters" else "max_iters"
    if cfg.get(other) is not None and (key in train or train.get("type") in LOOPS):
        counted = key.removeprefix("max_")
        raise ConfigError(
            f"{other}={cfg[other]} is set, but the loop of train_cfg counts {counted}; "
            f"set {key} (and {other}=None, if it is a base config that sets it)."
        )
    if cfg.get(key) is not None:
        # Kept in one place, so that a written config reads back.
        train[key] = cfg.pop(key)
    if key == "max_iters":
        _count_iterations(cfg, train)
        return
    sampler = (cfg.get("train_dataloader") or {}).get("sampler") or {}
    if sampler.get("infinite") and train.get("type") in LOOPS:
        raise ConfigError(
            "train_dataloader.sampler.infinite=True is for iterations: an epoch would "
            "never end; leave it out, or set train_cfg.type='IterBasedTrainLoop'."
        )


def _count_iterations(cfg: Config | ConfigDict, train: Mapping[str, Any]) -> None:
    """Let hooks that count epochs count iterations, in place.

    An iteration-based training is a single epoch: by epoch, its only checkpoint would
    be written at its end. It gets one at each evaluation and ten at least.
    """
    hooks = cfg.get("default_hooks") or {}
    checkpoint = hooks.get("checkpoint")
    if checkpoint and checkpoint.get("by_epoch", True):
        checkpoint["by_epoch"] = False
        if checkpoint.get("interval", 1) == 1:  # of epochs
            length = train.get("max_iters") or 10_000
            every = min(train.get("val_interval") or 1000, math.ceil(length / 10))
            checkpoint["interval"] = int(every)
    if hooks.get("logger"):
        hooks["logger"].setdefault("log_metric_by_epoch", False)
    cfg["log_processor"] = {**(cfg.get("log_processor") or {}), "by_epoch": False}


def length_key(train_cfg: Mapping[str, Any]) -> str:
    """Return ``max_iters`` if the loop counts iterations, else ``max_epochs``."""
    by_iters = (
        train_cfg.get("type") == "IterBasedTrainLoop"
        or train_cfg.get("by_epoch") is False
        or "max_iters" in train_cfg
    )
    return "max_iters" if by_iters else "max_epochs"


def resolve_fractions(scheduler: Any, *, epochs: int, iters: int) -> Any:
    """Copy scheduler configs, with all points in time in epochs or iterations."""
    size = dict(epochs=epochs, iters=iters)
    if isinstance(scheduler, Sequence):
        return [resolve_fractions(one, **size) for one in scheduler]
    if not isinstance(scheduler, dict):
        return scheduler
    if "type" not in scheduler:  # one for each of several optimizers
        return {name: resolve_fractions(one, **size) for name, one in scheduler.items()}
    length = epochs if scheduler.get("by_epoch", True) else iters
    found = dict(scheduler)
    for key in ("begin", "end"):
        if isinstance(found.get(key), float) and 0 < found[key] <= 1:
            # As in moe.upcycling: equal fractions give equal iterations.
            found[key] = math.ceil(found[key] * length)
    if "milestones" in found:
        found["milestones"] = [
            round(stone * length) if 0 < stone < 1 else stone
            for stone in found["milestones"]
        ]
    return found


def intervals(schedulers: Any) -> list[tuple[int, list[int]]]:
    """Return ends and milestones of built schedulers, over all optimizers."""
    if isinstance(schedulers, _ParamScheduler):
        return [(schedulers.end, sorted(getattr(schedulers, "milestones", ())))]
    if isinstance(schedulers, dict):  # of several optimizers, or a config
        schedulers = list(schedulers.values())
    if not isinstance(schedulers, (list, tuple)):
        return []
    return [span for inner in schedulers for span in intervals(inner)]
