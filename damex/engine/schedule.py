"""What hooks do around every training iteration: seeds, and a detector's schedules."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner

from damex.datasets.mixture import mix_seed
from damex.models.detectors import RoutedDetector


@HOOKS.register_module()
class TrainingStepHook(Hook):
    """Tell a detector with experts what it cannot know by itself.

    In training where each iteration stands, for the schedules of gates and the warm-up
    of routers: by the runner's own count, as mmengine's message hub is that of the last
    runner in the process. With gradient accumulation every micro-batch is an iteration.
    In evaluation that token counts are wanted. And a checkpoint gets the resolved
    ``moe`` tree as ``meta['moe']``, so that it can be compared when it is loaded.
    """

    priority = "VERY_HIGH"

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Begin a training step."""
        detector = routed_detector(runner)
        if detector is not None:
            detector.begin_step(iteration=runner.iter, max_iters=runner.max_iters)

    def before_val_epoch(self, runner: Runner) -> None:
        """Ask for token counts."""
        self._count_tokens(runner, True)

    def after_val_epoch(
        self, runner: Runner, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Ask no more."""
        self._count_tokens(runner, False)

    before_test_epoch, after_test_epoch = before_val_epoch, after_val_epoch

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Keep the ``moe`` tree; empty for a dense detector."""
        detector = routed_detector(runner)
        if detector is not None:
            checkpoint["meta"]["moe"] = detector.resolved_moe()

    def _count_tokens(self, runner: Runner, wanted: bool) -> None:
        detector = routed_detector(runner)
        if detector is not None:
            detector.counts_tokens = wanted


def routed_detector(runner: Runner) -> RoutedDetector | None:
    """The detector that a runner trains; None where it is none of damex's."""
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    return model if isinstance(model, RoutedDetector) else None


@HOOKS.register_module()
class IterationSeedHook(Hook):
    """Seed all generators before every training iteration.

    Denoising queries, gate noise and dropout then depend on (seed, process,
    iteration) alone. A run that was killed and resumed from its last checkpoint ends
    with the same weights as one that was not, on every process, without storing any
    generator state. Data augmentation gets its seeds from ``MixtureSampler``.
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
