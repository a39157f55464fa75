"""Early stopping over interruptions, and scores to decide by that do not exist."""

from types import SimpleNamespace

import pytest
from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.logging import MessageHub

from damex.engine.monitoring import EarlyStoppingHook, check_monitored
from damex.engine.optim import set_length
from damex.errors import ConfigError

AP = "mixture/mean/AP"


class StubRunner:
    def __init__(self, name, state=None):
        self.message_hub = MessageHub(name)
        self._resume = state is not None
        if state is not None:
            self.message_hub.load_state_dict(state)
        self.train_loop = SimpleNamespace(stop_training=False)
        self.logger = SimpleNamespace(info=print)
        self.iter = 0


def evaluate(hook, runner, iteration, score):
    runner.iter = iteration
    hook.after_val_epoch(runner, {AP: score})
    return runner.train_loop.stop_training


def early_stopping(**options):
    return EarlyStoppingHook(AP, rule="greater", **options)


def test_patience_goes_on_in_a_resumed_run():
    hook, runner = early_stopping(patience=2), StubRunner("first")
    hook.before_train(runner)
    assert [evaluate(hook, runner, i, s) for i, s in ((6, 0.5), (12, 0.4))] == [
        False
    ] * 2
    again, resumed = early_stopping(patience=2), StubRunner("second", save(runner))
    again.before_train(resumed)
    assert not evaluate(again, resumed, 12, 0.4)  # repeated, counted once
    assert evaluate(again, resumed, 18, 0.5005)  # less than 0.001 better
    over = StubRunner("third", save(resumed))
    early_stopping(patience=2).before_train(over)
    assert over.train_loop.stop_training
    longer = StubRunner("fourth", save(resumed))
    early_stopping(patience=3).before_train(longer)
    assert not longer.train_loop.stop_training


def test_an_evaluation_builds_no_training_loop():
    early_stopping().before_run(None)


def test_a_goal_that_was_reached_ends_a_resumed_run():
    hook, runner = early_stopping(stopping_threshold=0.6), StubRunner("goal")
    assert evaluate(hook, runner, 6, 0.7)
    resumed = StubRunner("goal resumed", save(runner))
    early_stopping(stopping_threshold=0.6).before_train(resumed)
    assert resumed.train_loop.stop_training


def save(runner):
    return runner.message_hub.state_dict()


def monitored(hooks=(), schedulers=(), **changes):
    datasets = [dict(name="street"), dict(name="park")]
    cfg = dict(
        val_evaluator=dict(type="MixtureMetric"),
        val_dataloader=dict(dataset=dict(type="MixtureDataset", datasets=datasets)),
        param_scheduler=list(schedulers),
    )
    return SimpleNamespace(cfg=Config({**cfg, **changes}), hooks=hooks)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "coco/bbox_mAP",
            "'coco/bbox_mAP': the evaluation has no such score; it has: m",
        ),
        ("mixture/mean/ap", "did you mean 'mixture/mean/AP'"),
        ("mean/AP", "did you mean 'mixture/mean/AP'"),
        ("mixture/streat/AP50", "did you mean 'mixture/street/AP50'"),
        ("mixture/street/routing_accuracy", "did you mean"),
    ],
)
def test_a_score_that_does_not_exist_is_refused(name, words):
    best = CheckpointHook(save_best=name, rule="greater")
    stopping = EarlyStoppingHook(name, rule="greater")
    plateau = dict(type="ReduceOnPlateauLR", monitor=name, rule="greater")
    for given in (
        dict(hooks=[best]),
        dict(hooks=[stopping]),
        dict(schedulers=[plateau]),
    ):
        with pytest.raises(ConfigError, match=words):
            check_monitored(monitored(**given), has_experts=False)
    other = [dict(type="MixtureMetric"), dict(type="CocoMetric")]
    check_monitored(monitored([best], val_evaluator=other), has_experts=False)
    check_monitored(monitored([best], val_evaluator=None), has_experts=False)


def test_scores_that_exist_are_accepted():
    names = [AP, "mixture/park/AP_small", "mixture/park/routing_accuracy"]
    hooks = [CheckpointHook(save_best=names, rule="greater"), CheckpointHook()]
    hooks.append(CheckpointHook(save_best="auto"))
    check_monitored(monitored(hooks), has_experts=True)
    hooks = [CheckpointHook(save_best="mixture/park/AP_class_2", rule="greater")]
    with pytest.raises(ConfigError, match="no such score"):
        check_monitored(monitored(hooks), has_experts=True)
    evaluator = dict(type="MixtureMetric", classwise=True)
    check_monitored(monitored(hooks, val_evaluator=evaluator), has_experts=True)


LOOP = dict(type="IterBasedTrainLoop", max_iters=1000)
BASE = dict(by_epoch=True, interval=1)


@pytest.mark.parametrize(
    ("train", "given", "expected"),
    [
        (dict(LOOP, val_interval=50), BASE, (False, 50)),
        (dict(LOOP, val_interval=1000), BASE, (False, 100)),  # ten at least
        (LOOP, BASE, (False, 100)),
        (dict(LOOP, max_iters=7, val_interval=3), BASE, (False, 1)),
        (dict(LOOP, val_interval=50), dict(BASE, interval=500), (False, 500)),
        (dict(LOOP, val_interval=50), dict(by_epoch=False, interval=1), (False, 1)),
        (dict(max_epochs=3, val_interval=2), BASE, (True, 1)),
    ],
)
def test_checkpoints_and_logs_count_as_the_loop_does(train, given, expected):
    hooks = dict(checkpoint=dict(given), logger=dict(type="LoggerHook"))
    processor = dict(type="LogProcessor", window_size=50, by_epoch=True)
    cfg = Config(dict(train_cfg=train, default_hooks=hooks, log_processor=processor))
    set_length(cfg)
    hook = cfg.default_hooks.checkpoint
    assert (hook.by_epoch, hook.interval) == expected
    assert cfg.log_processor.to_dict() == dict(processor, by_epoch=expected[0])
    assert cfg.default_hooks.logger.get("log_metric_by_epoch", True) == expected[0]
