"""Scores that decide: early stopping and the best checkpoint, over interruptions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmdet.registry import HOOKS
from mmengine.hooks import EarlyStoppingHook as MMEngineEarlyStoppingHook
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner

from damex.config_files import mixture_datasets
from damex.engine.resumption import EVALUATED
from damex.errors import ConfigError, did_you_mean
from damex.evaluation import score_names


@HOOKS.register_module()
class EarlyStoppingHook(MMEngineEarlyStoppingHook):
    """mmengine's hook, but patience and best score are kept in checkpoints.

    The default of ``min_delta``, the smallest improvement that counts, suits scores in
    [0, 1].
    """

    priority = "LOW"  # before CheckpointHook, which saves the state

    def __init__(
        self, monitor: str, *args: Any, min_delta: float = 0.001, **kwargs: Any
    ) -> None:
        super().__init__(monitor, *args, min_delta=min_delta, **kwargs)
        self._iteration = -1  # of the last evaluation that was counted

    def before_run(self, runner: Runner) -> None:
        """Do nothing: mmengine's builds the training loop, for an evaluation, too."""

    def before_train(self, runner: Runner) -> None:
        """Continue to count where a resumed training was; it may be over."""
        if not runner._resume or self._key not in runner.message_hub.runtime_info:
            return
        state = runner.message_hub.get_info(self._key)
        self.best_score, self.wait_count, self._iteration = state
        goal, is_beyond = self.stopping_threshold, self.rule_map[self.rule]
        is_reached = goal is not None and is_beyond(self.best_score, goal)
        runner.train_loop.stop_training = is_reached or self.wait_count >= self.patience

    def after_val_epoch(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Count each evaluation once, also if it is repeated by a resumed run."""
        if runner.iter == self._iteration:
            return
        super().after_val_epoch(runner, metrics)
        self._iteration = runner.iter
        state = [float(self.best_score), self.wait_count, self._iteration]
        runner.message_hub.update_info(self._key, state)

    @property
    def _key(self) -> str:
        return f"early_stopping_{self.monitor}"


@HOOKS.register_module()
class PendingEvaluationHook(Hook):
    """Make up for the evaluation of a checkpoint that was interrupted.

    A checkpoint is written before its evaluation, and again only if the score is the
    best. A run that is resumed from it would never know the score.
    """

    priority = "LOWEST"

    def before_train(self, runner: Runner) -> None:
        """Evaluate if the resumed run would have, unless the checkpoint knows it."""
        known = runner.message_hub.runtime_info.get(EVALUATED)
        is_pending = runner._resume and known != runner.iter
        if is_pending and runner.val_loop is not None and _is_due(runner.train_loop):
            runner.val_loop.run()


def _is_due(loop: Any) -> bool:
    """Whether a training loop evaluates after the steps that it has done."""
    if isinstance(loop, IterBasedTrainLoop):
        done, total = loop.iter, loop.max_iters
    elif isinstance(loop, EpochBasedTrainLoop):
        done, total = loop.epoch, loop.max_epochs
        if loop.iter != loop.epoch * len(loop.dataloader):
            return False
    else:
        return False
    loop._decide_current_val_interval()
    is_turn = done % loop.val_interval == 0 or done == total
    return done > 0 and done >= loop.val_begin and is_turn


def check_monitored(runner: Runner, *, has_experts: bool) -> None:
    """Raise ConfigError if a score to decide by is not one of the evaluation's.

    Unknown are the scores of other metrics than MixtureMetric.
    """
    evaluators = runner.cfg.get("val_evaluator") or []
    evaluators = evaluators if isinstance(evaluators, list) else [evaluators]
    if {one.get("type") for one in evaluators} != {"MixtureMetric"}:
        return
    dataset = (runner.cfg.get("val_dataloader") or {}).get("dataset")
    known = score_names(
        [spec["name"] for one in mixture_datasets(dataset) for spec in one["datasets"]],
        has_experts=has_experts,
    )
    classwise = any(one.get("classwise") for one in evaluators)
    for place, name in _monitored(runner):
        if classwise and re.fullmatch(r"mixture/.+/AP_class_\d+", name):
            continue
        if name != "auto" and name not in known:
            raise ConfigError(
                f"{place}={name!r}: the evaluation has no such score; "
                f"{did_you_mean(name, known, limit=12)}"
            )


def _monitored(runner: Runner) -> Iterator[tuple[str, str]]:
    """Yield place and name of each score that decides something."""
    for hook in runner.hooks:
        if getattr(hook, "save_best", None):
            for name in hook.key_indicators:
                yield "default_hooks.checkpoint.save_best", name
        if isinstance(hook, MMEngineEarlyStoppingHook):
            yield f"monitor of {type(hook).__name__}", hook.monitor
    schedulers = runner.cfg.get("param_scheduler") or []
    for one in schedulers if isinstance(schedulers, Sequence) else [schedulers]:
        if "ReduceOnPlateau" in str(one.get("type")):
            yield f"monitor of {one['type']}", one.get("monitor", "loss")
