"""Hooks around every iteration: seeds, checks, expert mean decay, routing alarm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from mmdet.registry import HOOKS
from mmengine.dist import all_reduce
from mmengine.hooks import EMAHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner, set_random_seed
from torch import nn

from damex.datasets.mixture import mix_seed
from damex.engine.checkpoint import not_finite
from damex.engine.optimizer_state import NAMES, optimizer_of, parameter_names
from damex.errors import check_number, check_sizes
from damex.models.blocks import MoEFFN
from damex.models.detectors import RoutedDetector
from damex.models.insertion import moe_blocks
from damex.moe import LayerTally, add_tallies, decay_to_mean

# Curves of more experts would crowd out all others.
MAX_CURVES = 16
MAX_SENTENCES = 6
LEAST_EVENNESS = 0.2
# Warn if a smaller share of a dataset's tokens reaches its experts:
# datasets that a router can tell apart have 0.9 and more.
WELL_ROUTED = 0.75


def bare_model(runner: Runner) -> Any:
    """Return the model of a runner, unwrapped."""
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


def models_of(runner: Runner) -> list[nn.Module]:
    """Return the detector of a runner and its averages, unwrapped."""
    averages = [
        hook.ema_model.module
        for hook in runner.hooks
        if isinstance(hook, EMAHook) and hasattr(hook, "ema_model")
    ]
    return [bare_model(runner), *averages]


def average_batch_norms(runner: Runner) -> None:
    """Average the running statistics over all processes; collective.

    Each process has those of its own images. Before an evaluation or checkpoint all get
    the same, so that one detector is scored, saved and resumed.
    """
    for model in models_of(runner):
        for name, statistic_C in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                mean_C = statistic_C.double()  # exact where all processes agree
                all_reduce(mean_C, op="mean")
                statistic_C.copy_(mean_C)


def routed_detector(runner: Runner) -> RoutedDetector | None:
    """Return the detector that a runner trains; None if it is not one of damex's."""
    model = bare_model(runner)
    return model if isinstance(model, RoutedDetector) else None


@HOOKS.register_module()
class TrainingStepHook(Hook):
    """Pass run state to a detector with experts; reject non-finite values.

    In training the detector gets the iteration, for gate schedules, router warm-up and
    upcycling. It is the runner's own count (mmengine's message hub holds that of the
    last runner in the process), where every micro-batch of gradient accumulation
    counts. In evaluation it counts tokens. Checkpoints get the resolved ``moe`` tree as
    ``meta['moe']`` and the optimizer's parameter names as ``meta['optimizer_names']``.
    Non-finite losses end the training, and non-finite weights are never saved.
    """

    priority = "VERY_HIGH"

    def before_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Begin a training step."""
        if (detector := routed_detector(runner)) is not None:
            detector.begin_step(
                iteration=runner.iter,
                max_iters=runner.max_iters,
                optimizer=getattr(runner.optim_wrapper, "optimizer", None),
            )

    def after_train_iter(
        self, runner: Runner, *_: Any, outputs: Any = None, **__: Any
    ) -> None:
        """Check the loss on the first process; gradients are summed over all."""
        if runner.rank == 0 and outputs and "loss" in outputs:
            wrapper = runner.optim_wrapper
            # A fixed scale, as of bfloat16, would skip all further steps.
            fixed, norms = getattr(wrapper, "_scale_update_param", None), None
            scaler = getattr(wrapper, "loss_scaler", None) if fixed is None else None
            if fixed == 1.0:  # so that no gradient overflows; known with clip_grad
                norms = runner.message_hub.log_scalars.get("train/grad_norm")
            norm = 0.0 if norms is None else norms.current()
            check_losses(outputs, scaler, iteration=runner.iter + 1, grad_norm=norm)

    def before_val_epoch(self, runner: Runner) -> None:
        """Score one detector; request token counts."""
        average_batch_norms(runner)
        if (detector := routed_detector(runner)) is not None:
            detector.counts_tokens = True

    def after_val_epoch(self, runner: Runner, **_: Any) -> None:
        """Stop counting tokens."""
        if (detector := routed_detector(runner)) is not None:
            detector.counts_tokens = False

    before_test_epoch, after_test_epoch = before_val_epoch, after_val_epoch

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Check the weights; save parameter names and the ``moe`` tree."""
        model, detector = bare_model(runner), routed_detector(runner)
        if broken := not_finite(checkpoint.get("state_dict", {})):
            raise FloatingPointError(
                f"weights such as {broken[0]} are not finite after iteration "
                f"{checkpoint['meta']['iter']}"
            )
        if detector is not None:
            checkpoint["meta"]["moe"] = detector.resolved_moe()
        if "optimizer" not in checkpoint:
            return
        if (optimizer := optimizer_of(runner.optim_wrapper)) is not None:
            checkpoint["meta"][NAMES] = parameter_names(model, optimizer)


def check_losses(
    losses: Mapping[str, Any], scaler: Any, *, iteration: int, grad_norm: float = 0.0
) -> None:
    """Raise FloatingPointError if the sum of losses or the norm is not finite.

    In mixed precision a gradient scaler skips such a step, or one whose gradients are
    not finite, and halves its scale; then only a scale below 1 is rejected.
    """
    scales = scaler is not None and scaler.is_enabled()
    helps = scales and scaler.get_scale() >= 1.0
    is_finite = _is_finite(losses["loss"]) and math.isfinite(grad_norm)
    if helps or (not scales and is_finite):
        return
    names = [
        name
        for name, value in losses.items()
        if "loss" in name and name != "loss" and not _is_finite(value)
    ]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    total = "gradients" if _is_finite(losses["loss"]) else "the sum of losses"
    which = ", ".join(names[:4]) or total
    raise FloatingPointError(f"not finite in iteration {iteration}: {which}{more}")


def _is_finite(value: Any) -> bool:
    return math.isfinite(torch.as_tensor(value).detach().sum())


@HOOKS.register_module()
class IterationSeedHook(Hook):
    """Seed all generators before every training iteration.

    Denoising queries, gate noise and dropout then depend only on (seed, process,
    iteration), so a resumed run ends with the same weights as an uninterrupted one
    without storing generator states. ``MixtureSampler`` seeds data augmentation.
    """

    priority = "VERY_HIGH"

    def before_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Seed random, numpy and torch (CPU and GPU)."""
        set_random_seed(mix_seed(runner.seed or 0, runner.rank, runner.iter))


@HOOKS.register_module()
class ExpertMeanDecayHook(Hook):
    """Pull the experts of a layer towards their mean after every optimizer step.

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
        check_number("ExpertMeanDecayHook", ">= 0", decay=decay)
        self.decay = decay

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Move the trainable experts if the optimizer made a step."""
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
            experts has 93% of the tokens or more.
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
        check_sizes("RoutingAlarmHook", interval=interval, min_iters=min_iters)
        check_number("RoutingAlarmHook", "in [0, 1)", least_evenness=least_evenness)
        self.interval = interval
        self.least_evenness = least_evenness
        self.min_iters = min_iters
        self._epoch: dict[str, LayerTally] = {}
        self._iters = 0

    def before_train(self, runner: Runner) -> None:
        """Start the tally of the detector."""
        if (detector := routed_detector(runner)) is not None:
            detector.tally = {}
        self._epoch, self._iters = {}, 0

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Add a point to the curves every `interval` iterations."""
        self._iters += 1
        if (runner.iter + 1) % self.interval == 0:
            self._collect(runner, runner.iter + 1)

    def after_train_epoch(self, runner: Runner) -> None:
        """Warn of problems; an iteration-based training is judged at evaluations."""
        if self._iters < self.min_iters:
            return
        self._collect(runner, runner.iter)
        problems = routing_problems(self._epoch, least_evenness=self.least_evenness)
        if problems:
            shown, more = problems[:MAX_SENTENCES], len(problems) - MAX_SENTENCES
            if more > 0:
                shown.append(f"and {more} more layers")
            runner.logger.warning(
                f"routing until iteration {runner.iter}: {'; '.join(shown)}. An expert "
                "without tokens learns nothing; see 'When routing collapses' in "
                "docs/experts/inspecting.md."
            )
        self._epoch, self._iters = {}, 0

    before_val_epoch = after_train_epoch

    def after_train(self, runner: Runner) -> None:
        """Stop the tally."""
        if (detector := routed_detector(runner)) is not None:
            detector.tally = None

    def _collect(self, runner: Runner, step: int) -> None:
        detector = routed_detector(runner)
        if detector is None or detector.tally is None:
            return
        taken = {name: summed(tally) for name, tally in detector.tally.items()}
        detector.tally = {}
        add_tallies(self._epoch, taken)
        if scalars := routing_scalars(taken):
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


def routing_problems(
    tallies: Mapping[str, LayerTally], *, least_evenness: float
) -> list[str]:
    """Describe the layers with a bad expert load, one part of a sentence each."""
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


def routing_warnings(detector: nn.Module, scores: Mapping[str, float]) -> list[str]:
    """Sentences about datasets whose tokens do not reach the experts of their group.

    Empty unless a loss teaches the routers the groups: other experts belong to none.

    Args:
        detector: A detector with or without experts.
        scores: ``<dataset>/routing_accuracy`` of an evaluation, among others.
    """
    losses = [loss for block in moe_blocks(detector) for loss in block.moe.losses]
    if not any(loss.needs_groups for loss in losses):
        return []
    rows = (key.rpartition("/") for key in scores if key.endswith("/routing_accuracy"))
    shares = {name: scores[f"{name}/{score}"] for name, _, score in rows}
    return [
        f"{name}: {share:.0%} of its tokens reached the experts of its dataset group, "
        "the rest experts that have not learned its labels. If its images look like "
        "those of another dataset, give both one group='NAME' in the mixture, or train "
        "without experts (moe=None); else train longer."
        for name, share in shares.items()
        if name != "mean" and share < WELL_ROUTED
    ]


def _experts(numbers: Any) -> str:
    words = ", ".join(str(int(number)) for number in numbers)
    return f"experts {words}" if len(numbers) > 1 else f"expert {words}"


def summed(tally: LayerTally) -> LayerTally:
    """Sum a tally over all processes and move it to the CPU."""
    both = torch.cat([tally.counts_GE.flatten(), tally.tokens_G])
    all_reduce(both)
    counts, tokens_G = both.cpu().split([tally.counts_GE.numel(), len(tally.tokens_G)])
    map_GE = tally.group_experts_GE
    map_GE = None if map_GE is None else map_GE.cpu()
    return LayerTally(counts.view_as(tally.counts_GE), tokens_G, map_GE)
