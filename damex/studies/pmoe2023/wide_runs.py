"""Training of the wide residual networks with and without experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from damex.studies.pmoe2023.digits import DigitSource
from damex.studies.pmoe2023.jobs import Task
from damex.studies.pmoe2023.plan import Plan
from damex.studies.pmoe2023.training import accuracy, fit
from damex.studies.pmoe2023.wide_resnet import (
    WideResNet,
    as_images,
    last_layer_parameters,
)
from damex.studies.progress import StudyProgress

__all__ = ["WideRuns", "run_wide"]

LR = 0.1  # as in the paper


@dataclass(frozen=True)
class WideRuns:
    """Results of the wide residual networks.

    Attributes:
        accuracy: By whether there are experts and number of samples: one accuracy per
            seed, in percent.
        parameters: By whether there are experts: parameters of the last convolution or
            of all its experts, and of their router.
    """

    accuracy: dict[tuple[bool, int], list[float]]
    parameters: dict[bool, tuple[int, int]]


def run_wide(
    plan: Plan, source: DigitSource, seeds: Sequence[int], progress: StudyProgress
) -> WideRuns:
    """Trains WRN and WRN-pMoE with every number of samples and every seed.

    Args:
        plan: Sizes.
        source: Pictures.
        seeds: Seeds of samples, starting values and orders.
        progress: Shown here.
    """
    runs = WideRuns({}, {})
    cells = [
        (seed, count, experts)
        for seed in seeds
        for count in plan.wide_samples
        for experts in (False, True)
    ]
    for seed, count, experts in progress.track(cells, "wide residual networks"):
        train = as_images(Task().train(source, count, seed))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = WideResNet(
                side=train.patches_BND.shape[-1], num_classes=2, experts=experts
            )
        fit(model, train, lr=LR, epochs=plan.wide_epochs, seed=seed)
        test = as_images(Task().test(source, plan.test_samples, seed))
        runs.accuracy.setdefault((experts, count), []).append(accuracy(model, test))
        runs.parameters[experts] = last_layer_parameters(model)
    return runs
