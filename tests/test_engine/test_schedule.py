"""Hooks around an iteration: seeds, and what a detector is told."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.logging import MessageHub
from mmengine.optim import CosineAnnealingLR, MultiStepLR, OptimWrapper
from mmengine.runner import CheckpointLoader

from damex.engine.hooks import ExpertMeanDecayHook, IterationSeedHook, TrainingStepHook
from damex.engine.optim import intervals
from damex.errors import ConfigError
from damex.models.insertion import moe_blocks

MOE = dict(
    layers=dict(decoder=[0]),
    gate=dict(type="DenseToSparseGate", start_temperature=4.0, end_temperature=1.0),
)


@pytest.fixture
def make_runner(build, make_batch, quick_runner):
    """A runner of mmengine with a tiny detector; each iteration is a micro-batch."""

    def make(name, *, max_iters):
        detector = build(moe=MOE)
        optimizer = torch.optim.SGD(detector.parameters(), lr=1e-4)
        return quick_runner(
            detector,
            make_batch([0, 1]),
            OptimWrapper(optimizer, accumulative_counts=2),
            name=name,
            train_cfg=dict(by_epoch=False, max_iters=max_iters),
            custom_hooks=[dict(type="TrainingStepHook")],
        )

    return make


def progress_of(runner):
    (block,) = moe_blocks(runner.model)
    return block.moe.gate.progress.item()


def test_each_of_two_runners_in_a_process_counts_its_own_iterations(make_runner):
    """mmengine's message hub knows only the runner that was made last."""
    first = make_runner("first", max_iters=3)
    second = make_runner("second", max_iters=5)
    assert MessageHub.get_current_instance() is second.message_hub
    first.train()
    assert progress_of(first) == 1.0
    assert progress_of(second) == 0.0
    second.train_loop._iter = 1
    TrainingStepHook().before_train_iter(second, batch_idx=1)
    assert progress_of(second) == 0.25


def test_a_checkpoint_holds_the_resolved_moe(make_runner):
    runner = make_runner("first", max_iters=2)
    runner.train()
    runner.save_checkpoint(runner.work_dir, "last.pth", by_epoch=False)
    saved = CheckpointLoader.load_checkpoint(f"{runner.work_dir}/last.pth", "cpu")
    moe = saved["meta"]["moe"]
    assert moe["gate"]["start_temperature"] == 4.0
    assert moe["router"]["type"] == "LinearRouter"  # the default
    assert moe == runner.model.resolved_moe()
    # mmengine numbers the parameters in the state of an optimizer.
    names = saved["meta"]["optimizer_names"]
    assert names == [name for name, _ in runner.model.named_parameters()]
    (group,) = saved["optimizer"]["param_groups"]
    assert len(names) == len(group["params"])


@pytest.mark.parametrize("epoch", ["val", "test"])
def test_tokens_are_counted_in_evaluation_and_nowhere_else(build, epoch):
    runner, hook = SimpleNamespace(model=build(moe=MOE), hooks=[]), TrainingStepHook()
    assert not runner.model.counts_tokens
    getattr(hook, f"before_{epoch}_epoch")(runner)
    assert runner.model.counts_tokens
    getattr(hook, f"after_{epoch}_epoch")(runner, metrics={})
    assert not runner.model.counts_tokens


def test_a_dense_model_of_mmdet_is_left_alone():
    model = torch.nn.Linear(1, 1)
    runner = SimpleNamespace(model=model, iter=0, max_iters=1, hooks=[])
    hook, checkpoint = TrainingStepHook(), dict(meta={})
    hook.before_train_iter(runner, batch_idx=0)
    hook.before_val_epoch(runner)
    hook.before_save_checkpoint(runner, checkpoint)
    assert checkpoint == dict(meta={})
    assert not hasattr(runner.model, "counts_tokens")


def test_the_spans_of_schedulers_in_every_form_that_mmengine_takes():
    config = dict(type="LinearLR", by_epoch=False, start_factor=0.1, end=7)
    assert intervals(None) == intervals(config) == intervals([config]) == []
    assert intervals(dict(detector=config, other=[config])) == []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    cosine = CosineAnnealingLR(optimizer, T_max=9, end=9)
    steps = MultiStepLR(optimizer, milestones=[5, 3], end=6)
    assert intervals(steps) == [(6, [3, 5])]
    assert intervals(dict(detector=[cosine, steps], other=[])) == [(9, []), (6, [3, 5])]


def draw(*, seed=3, rank=0, iteration=5):
    runner = SimpleNamespace(seed=seed, rank=rank, iter=iteration)
    IterationSeedHook().before_train_iter(runner, batch_idx=0)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_an_iteration_draws_what_its_seed_process_and_number_say():
    first = draw()
    torch.rand(1000)
    random.random()
    assert draw() == first
    drawn = [draw(), draw(seed=4), draw(rank=1), draw(iteration=6)]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 4


@pytest.fixture
def decay_once(build):
    """Runs the hook once; the detector's state before, and the detector."""

    def run(moe, *, lr=0.5, decay=0.4, accumulate=1):
        detector = build(moe=moe)
        optimizer = torch.optim.SGD(detector.parameters(), lr=lr)
        wrapper = OptimWrapper(optimizer, accumulative_counts=accumulate)
        wrapper._inner_count = 1  # one backward pass
        before = {key: value.clone() for key, value in detector.state_dict().items()}
        runner = SimpleNamespace(model=detector, optim_wrapper=wrapper)
        ExpertMeanDecayHook(decay).after_train_iter(runner, batch_idx=0)
        return before, detector

    return run


def changed(before, detector):
    after = detector.state_dict()
    return {key for key, value in before.items() if not torch.equal(value, after[key])}


def test_experts_and_nothing_else_decay_to_their_mean(decay_once):
    before, detector = decay_once({**MOE, "shared_expert": dict(type="SharedExpert")})
    experts = "decoder.layers.0.ffn.moe.experts."
    names = ("w1_EDH", "b1_EH", "w2_EHD", "b2_ED")
    assert changed(before, detector) == {experts + name for name in names}
    for name in names:
        old = before[experts + name]
        expected = old - 0.5 * 0.4 * (old - old.mean(0))
        new = detector.state_dict()[experts + name]
        torch.testing.assert_close(new, expected)


def test_experts_cut_from_an_ffn_decay_by_parts(decay_once):
    moe = dict(layers=dict(decoder=[0]), fine_grained=dict(parts=2, copies=3))
    before, detector = decay_once(moe)
    # copies are equal at the start, and the two parts of each are not
    torch.testing.assert_close(detector.state_dict(), before)


def test_experts_do_not_decay_without_a_step_of_the_optimizer(decay_once):
    assert not changed(*decay_once(MOE, accumulate=2))
    assert not changed(*decay_once(None))  # and a dense detector has none


def test_the_ffn_of_a_dense_phase_does_not_decay(decay_once):
    assert not changed(*decay_once({**MOE, "upcycling": dict(iters=2)}))


def test_a_negative_decay_is_refused():
    with pytest.raises(ConfigError, match="decay must be >= 0, got -1"):
        ExpertMeanDecayHook(-1)
