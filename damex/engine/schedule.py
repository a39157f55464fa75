"""Schedules, and hooks around every iteration: seeds, checks, expert mean decay."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mmdet.registry import HOOKS
from mmengine.config import Config, ConfigDict
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, _ParamScheduler
from mmengine.runner import Runner

from damex.datasets.mixture import mix_seed
from damex.engine.optimizer_state import NAMES, parameter_names
from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.detectors import RoutedDetector
from damex.moe import decay_to_mean

LOOPS = (None, "EpochBasedTrainLoop", "IterBasedTrainLoop")  # of mmengine


@HOOKS.register_module()
class TrainingStepHook(Hook):
    """Pass run state to a detector with experts; reject non-finite values.

    In training the detector gets the iteration, for gate schedules, router warm-up and
    upcycling. It is the runner's own count (mmengine's message hub holds that of the
    last runner in the process), where every micro-batch of gradient accumulation
    counts. In evaluation it counts tokens. Checkpoints get the resolved ``moe`` tree as
    ``meta['moe']`` and the optimiser's parameter names as ``meta['optimizer_names']``.
    Non-finite losses end the training, and non-finite weights are never saved.
    """

    priority = "VERY_HIGH"

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Begin a training step."""
        detector = routed_detector(runner)
        if detector is not None:
            detector.begin_step(
                iteration=runner.iter,
                max_iters=runner.max_iters,
                optimizer=getattr(runner.optim_wrapper, "optimizer", None),
            )

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the loss on the first process; gradients are summed over all."""
        if runner.rank == 0 and outputs and "loss" in outputs:
            scaler = getattr(runner.optim_wrapper, "loss_scaler", None)
            check_losses(outputs, scaler, iteration=runner.iter + 1)

    def before_val_epoch(self, runner: Runner) -> None:
        """Request token counts."""
        self._count_tokens(runner, True)

    def after_val_epoch(
        self, runner: Runner, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Stop counting tokens."""
        self._count_tokens(runner, False)

    before_test_epoch, after_test_epoch = before_val_epoch, after_val_epoch

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Check the weights; save parameter names and the ``moe`` tree."""
        for name, _ in bare_model(runner).named_parameters():
            weights = checkpoint.get("state_dict", {}).get(name)
            if weights is not None and not weights.isfinite().all():
                raise FloatingPointError(
                    f"weights such as {name} are not finite after iteration "
                    f"{checkpoint['meta']['iter']}"
                )
        detector = routed_detector(runner)
        if detector is not None:
            checkpoint["meta"]["moe"] = detector.resolved_moe()
        if "optimizer" in checkpoint and isinstance(runner.optim_wrapper, OptimWrapper):
            checkpoint["meta"][NAMES] = parameter_names(
                bare_model(runner), runner.optim_wrapper.optimizer
            )

    def _count_tokens(self, runner: Runner, wanted: bool) -> None:
        detector = routed_detector(runner)
        if detector is not None:
            detector.counts_tokens = wanted


def check_losses(losses: Mapping[str, Any], scaler: Any, *, iteration: int) -> None:
    """Raise FloatingPointError if the sum of losses is not finite.

    In mixed precision a gradient scaler skips such a step and halves its scale; then
    only a scale below 1 is rejected.
    """
    if _is_finite(losses["loss"]):
        return
    if scaler is not None and scaler.is_enabled() and scaler.get_scale() >= 1.0:
        return
    names = [
        name
        for name, value in losses.items()
        if "loss" in name and name != "loss" and not _is_finite(value)
    ]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    which = ", ".join(names[:4]) or "the sum of losses"
    raise FloatingPointError(f"not finite in iteration {iteration}: {which}{more}")


def _is_finite(value: Any) -> bool:
    return math.isfinite(torch.as_tensor(value).detach().sum())


def routed_detector(runner: Runner) -> RoutedDetector | None:
    """Return the detector that a runner trains; None if it is not one of damex's."""
    model = bare_model(runner)
    return model if isinstance(model, RoutedDetector) else None


def bare_model(runner: Runner) -> Any:
    """Return the model of a runner, unwrapped."""
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


@HOOKS.register_module()
class IterationSeedHook(Hook):
    """Seed all generators before every training iteration.

    Denoising queries, gate noise and dropout then depend only on (seed, process,
    iteration), so a resumed run ends with the same weights as an uninterrupted one
    without storing generator states. ``MixtureSampler`` seeds data augmentation.
    """

    priority = "VERY_HIGH"

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Seed random, numpy and torch (CPU and GPU)."""
        seed = mix_seed(runner.seed or 0, runner.rank, runner.iter)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


@HOOKS.register_module()
class ExpertMeanDecayHook(Hook):
    """Pull the experts of a layer towards their mean after every optimiser step.

    Mean-regularised multi-task learning (Evgeniou and Pontil, KDD 2004), decoupled from
    the gradient and scaled by the learning rate as in AdamW (arXiv 1711.05101):
    w_e <- w_e - lr * decay * (w_e - mean). From 0 (independent experts) to infinity
    (one shared FFN). Convolutional experts, whose channels differ, are skipped::

        custom_hooks = [dict(type="ExpertMeanDecayHook", decay=1.0)]

    Args:
        decay: Non-negative. Without gradients, half of the distance is gone when the
            learning rates of the steps add up to 0.7 / decay.
    """

    priority = "HIGH"  # before EMA hooks

    def __init__(self, decay: float) -> None:
        if not decay >= 0.0:
            raise ConfigError(
                f"ExpertMeanDecayHook: decay must be 0 or more, got {decay!r}."
            )
        self.decay = decay

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
    ) -> None:
        """Move the trainable experts if the optimiser made a step."""
        detector, wrapper = routed_detector(runner), runner.optim_wrapper
        if detector is None or not wrapper.should_update():
            return
        rates = {id(p): g["lr"] for g in wrapper.param_groups for p in g["params"]}
        for block in detector.modules():
            if not isinstance(block, MoEFFN) or block.is_dense:
                continue  # in a dense phase only one expert is in use
            parts = 1 if block.split is None else block.split.parts
            experts: Any = block.moe.experts
            for parameter in experts.parameters():
                if parameter.requires_grad:  # not during router warm-up
                    share = min(self.decay * rates.get(id(parameter), 0.0), 1.0)
                    decay_to_mean(parameter, share, parts=parts)


def set_length(cfg: Config | ConfigDict) -> None:
    """Move the top-level ``max_epochs`` or ``max_iters`` into ``train_cfg``, in place.

    Raises:
        ConfigError: If mmengine's loop counts the other one; custom loops may differ.
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


def length_key(train_cfg: Mapping[str, Any]) -> str:
    """Return ``max_iters`` if the loop counts iterations, else ``max_epochs``."""
    by_iters = (
        train_cfg.get("type") == "IterBasedTrainLoop"
        or train_cfg.get("by_epoch") is False
        or "max_iters" in train_cfg
    )
    return "max_iters" if by_iters else "max_epochs"


def in_steps(scheduler: Any, *, epochs: int, iters: int) -> Any:
    """Copy scheduler configs, with all points in time in epochs or iterations."""
    size = dict(epochs=epochs, iters=iters)
    if isinstance(scheduler, Sequence):
        return [in_steps(one, **size) for one in scheduler]
    if not isinstance(scheduler, dict):
        return scheduler
    if "type" not in scheduler:  # one for each of several optimisers
        return {name: in_steps(one, **size) for name, one in scheduler.items()}
    length = epochs if scheduler.get("by_epoch", True) else iters
    found = dict(scheduler)
    for key in ("begin", "end"):
        if key in found and 0 < found[key] < 1:
            # As in moe.upcycling: equal fractions give equal iterations.
            found[key] = math.ceil(found[key] * length)
    if "milestones" in found:
        found["milestones"] = [
            round(stone * length) if 0 < stone < 1 else stone
            for stone in found["milestones"]
        ]
    return found


def spans(schedulers: Any) -> list[tuple[int, list[int]]]:
    """Return ends and milestones of built schedulers, over all optimisers."""
    if isinstance(schedulers, _ParamScheduler):
        return [(schedulers.end, sorted(getattr(schedulers, "milestones", ())))]
    if isinstance(schedulers, dict):  # of several optimisers, or a config
        schedulers = list(schedulers.values())
    if not isinstance(schedulers, (list, tuple)):
        return []
    return [span for inner in schedulers for span in spans(inner)]
