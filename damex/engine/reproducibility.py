"""IterationSeedHook: randomness that depends on the iteration and on nothing before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.runner import Runner

from damex.datasets.seeded_index import mix_seed

__all__ = ["IterationSeedHook"]


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
