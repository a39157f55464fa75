"""RoutingAlarmHook: the load of experts in training, and a warning of a collapse."""

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

# With more experts, their shares would drown all other curves.
MAX_CURVES = 16
MAX_SENTENCES = 6
LEAST_EVENNESS = 0.2


@HOOKS.register_module()
class RoutingAlarmHook(Hook):
    """Writes down how routers use their experts, and warns where they do not.

    Every few iterations the ``vis_backends`` of the config (TensorBoard and W&B among
    them) get, for each layer, ``routing/LAYER/evenness`` and, of up to 16 experts,
    ``routing/LAYER/expert_E``: the share of tokens whose router chose the expert. Both
    are of all processes, and, where the dataset chooses the expert in training, of what
    the router would choose.

    After an epoch one warning names the layers that sent nearly all tokens to one
    expert, or none to some; see `routing_faults`. Gates that fill their experts by
    themselves (expert choice) and dense gates never do.

    Args:
        interval: Iterations between points of the curves.
        least_evenness: Warn below it, see `LayerTally.evenness`; of 8 experts, one has
            93 % of the tokens or more.
        min_iters: Epochs that are shorter are judged together: routers begin at random.

    Raises:
        ConfigError: If an option cannot work.
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
        """Let the detector count."""
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
        """Add a point to the curves, now and then."""
        self._iters += 1
        if (runner.iter + 1) % self.interval == 0:
            self._collect(runner, runner.iter + 1)

    def after_train_epoch(self, runner: Runner) -> None:
        """Warn of what an epoch, or several short ones, showed.

        A training that counts iterations is one epoch to mmengine; it is judged before
        each of its evaluations.
        """
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
        """Count no more."""
        detector = routed_detector(runner)
        if detector is not None:
            detector.tally = None

    def _collect(self, runner: Runner, step: int) -> None:
        """Take what all processes counted, and write down its shares."""
        detector = routed_detector(runner)
        if detector is None or detector.tally is None:
            return
        taken = {name: summed(t) for name, t in detector.tally.take().items()}
        add_tallies(self._epoch, taken)
        scalars = routing_scalars(taken)
        if scalars:
            runner.visualizer.add_scalars(scalars, step=step)


def routing_scalars(tallies: Mapping[str, LayerTally]) -> dict[str, float]:
    """Curves of all layers, by their names; see `RoutingAlarmHook`."""
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
    """What is wrong with the load of experts; nothing for healthy layers.

    Args:
        tallies: By the name of the layer.
        least_evenness: See `LayerTally.evenness`.

    Returns:
        One part of a sentence for each layer with a fault.
    """
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
    """Numbers of experts as words."""
    words = ", ".join(str(int(number)) for number in numbers)
    return f"experts {words}" if len(numbers) > 1 else f"expert {words}"


def summed(tally: LayerTally) -> LayerTally:
    """The sum over all processes, on the host."""
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
