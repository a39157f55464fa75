"""RoutingAlarmHook: curves of the expert load, and a warning of routing collapse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mmdet.registry import HOOKS
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.runner import Runner

from damex.engine.schedule import routed_detector
from damex.errors import ConfigError
from damex.moe import LayerTally, RoutingTally, add_tallies

# Curves of more experts would crowd out all others.
MAX_CURVES = 16
MAX_SENTENCES = 6
LEAST_EVENNESS = 0.2


@HOOKS.register_module()
class RoutingAlarmHook(Hook):
    """Log how routers use their experts, and warn of a collapse.

    Every few iterations the ``vis_backends`` (such as TensorBoard and W&B) get, per
    layer, ``routing/LAYER/evenness`` and, for up to 16 experts,
    ``routing/LAYER/expert_E``: the share of tokens whose router chose the expert,
    summed over processes. If the dataset chooses the expert in training, the choice
    that the router would make is counted.

    After an epoch one warning names the layers that send nearly all tokens to one
    expert, or none to some. Expert-choice gates, which balance the load by design, and
    dense gates are never reported.

    Args:
        interval: Iterations between points of the curves.
        least_evenness: Warn below this `LayerTally.evenness`; at the default, one of 8
            experts has 93 % of the tokens or more.
        min_iters: Shorter epochs are judged together, as routers start at random.
    """

    priority = "LOW"

    def __init__(
        self,
        *,
        interval: int = 50,
        least_evenness: float = LEAST_EVENNESS,
        min_iters: int = 50,
    ) -> None:
        if interval < 1 or min_iters < 1 or not 0 <= least_evenness < 1:
            raise ConfigError(
                "RoutingAlarmHook: interval and min_iters must be 1 or more and "
                f"least_evenness in [0, 1), got {interval!r}, {min_iters!r} and "
                f"{least_evenness!r}."
            )
        self.interval = interval
        self.least_evenness = least_evenness
        self.min_iters = min_iters
        self._epoch: dict[str, LayerTally] = {}
        self._iters = 0

    def before_train(self, runner: Runner) -> None:
        """Start the tally of the detector."""
        detector = routed_detector(runner)
        if detector is not None:
            detector.tally = RoutingTally()
        self._epoch, self._iters = {}, 0

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
    ) -> None:
        """Add a point to the curves every `interval` iterations."""
        self._iters += 1
        if (runner.iter + 1) % self.interval == 0:
            self._collect(runner, runner.iter + 1)

    def after_train_epoch(self, runner: Runner) -> None:
        """Warn of faults; an iteration-based training is judged at evaluations."""
        if self._iters < self.min_iters:
            return
        self._collect(runner, runner.iter)
        faults = routing_faults(self._epoch, least_evenness=self.least_evenness)
        if faults:
            shown, more = faults[:MAX_SENTENCES], len(faults) - MAX_SENTENCES
            if more > 0:
                shown.append(f"and {more} more layers")
            runner.logger.warning(
                f"routing until iteration {runner.iter}: {'; '.join(shown)}. An expert "
                "without tokens learns nothing; see 'When routing collapses' in "
                "docs/using.md."
            )
        self._epoch, self._iters = {}, 0

    before_val_epoch = after_train_epoch

    def after_train(self, runner: Runner) -> None:
        """Stop the tally."""
        detector = routed_detector(runner)
        if detector is not None:
            detector.tally = None

    def _collect(self, runner: Runner, step: int) -> None:
        detector = routed_detector(runner)
        if detector is None or detector.tally is None:
            return
        taken = {name: summed(t) for name, t in detector.tally.take().items()}
        add_tallies(self._epoch, taken)
        scalars = routing_scalars(taken)
        if scalars:
            runner.visualizer.add_scalars(scalars, step=step)


def routing_scalars(tallies: Mapping[str, LayerTally]) -> dict[str, float]:
    """Return the curves of all layers by name; see `RoutingAlarmHook`."""
    found = {}
    for name, tally in tallies.items():
        if tally.evenness is not None:
            found[f"routing/{name}/evenness"] = tally.evenness
        shares = tally.share_E.tolist()
        if len(shares) <= MAX_CURVES:
            found |= {f"routing/{name}/expert_{e}": s for e, s in enumerate(shares)}
    return found


def routing_faults(
    tallies: Mapping[str, LayerTally], *, least_evenness: float
) -> list[str]:
    """Describe the layers with a faulty expert load, one part of a sentence each."""
    found = []
    for name, tally in tallies.items():
        share_E, evenness = tally.share_E, tally.evenness
        if evenness is not None and evenness < least_evenness:
            count = max(round(float(share_E.sum())), 1)
            top = share_E.topk(count).indices.sort().values
            least = share_E[top].min().item()
            found.append(f"{name} sends {least:.1%} of the tokens to {_experts(top)}")
        elif tally.unused and share_E.sum() > 0:
            found.append(f"{name} sends no token to {_experts(tally.unused)}")
    return found


def _experts(numbers: Any) -> str:
    words = ", ".join(str(int(number)) for number in numbers)
    return f"experts {words}" if len(numbers) > 1 else f"expert {words}"


def summed(tally: LayerTally) -> LayerTally:
    """Sum a tally over all processes and move it to the CPU."""
    sizes = (tally.counts_GE.numel(), tally.tokens_G.numel())
    both = torch.cat([tally.counts_GE.flatten(), tally.tokens_G])
    all_reduce(both)
    counts, tokens_G = both.cpu().split(sizes)
    map_GE = tally.group_experts_GE
    return LayerTally(
        counts.view_as(tally.counts_GE),
        tokens_G,
        None if map_GE is None else map_GE.cpu(),
    )
