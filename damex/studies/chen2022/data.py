"""Sizes of the data, and one task per seed."""

from __future__ import annotations

import torch

from damex.studies.cluster_data import (
    SETTINGS,
    ClusterSamples,
    ClusterTask,
    draw_task,
)

__all__ = ["NUM_CLUSTERS", "PATCH_DIMS", "draw_setting", "draw_train_and_test"]

NUM_CLUSTERS = 4
PATCH_DIMS = 50


def draw_setting(setting: str, generator: torch.Generator) -> ClusterTask:
    """Draws the directions of a task.

    Args:
        setting: Key of `SETTINGS`.
        generator: Of the directions.
    """
    return draw_task(
        SETTINGS[setting], generator, num_clusters=NUM_CLUSTERS, dims=PATCH_DIMS
    )


def draw_train_and_test(
    setting: str, num: int, seed: int
) -> tuple[ClusterSamples, ClusterSamples]:
    """Training and test data of equal size, new for each seed.

    Args:
        setting: Key of `SETTINGS`.
        num: Samples of each.
        seed: Of directions and samples.
    """
    generator = torch.Generator().manual_seed(seed)
    task = draw_setting(setting, generator)
    return task.draw(num, generator), task.draw(num, generator)
