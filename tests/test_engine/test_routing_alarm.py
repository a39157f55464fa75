"""The alarm: it names collapsed layers of real detectors, and no others."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from mmengine.optim import OptimWrapper

from damex.engine.hooks import RoutingAlarmHook, routing_problems, routing_scalars
from damex.errors import ConfigError
from damex.models.insertion import moe_blocks
from damex.moe import LayerTally


@pytest.fixture
def train(build, make_batch, quick_runner, tmp_path):
    """Train a tiny detector on one image of each dataset per iteration.

    ``choose`` makes the logits of the routers from theirs. Returns the warnings and the
    curves.
    """

    def make(*, moe, choose=None, max_iters=2, options=None, by_epoch=False):
        detector = build(moe=moe)
        for block in moe_blocks(detector):
            if choose is not None:
                block.moe.router.register_forward_hook(lambda *call: choose(call[2]))
        length = dict(max_epochs=max_iters) if by_epoch else dict(max_iters=max_iters)
        runner = quick_runner(
            detector,
            make_batch([0, 1, 2]),
            OptimWrapper(torch.optim.SGD(detector.parameters(), lr=0)),
            train_cfg=dict(by_epoch=by_epoch, **length),
            custom_hooks=[
                dict(type="RoutingAlarmHook", min_iters=2, **(options or {}))
            ],
            visualizer=dict(
                type="DetLocalVisualizer",
                name=tmp_path.name,
                vis_backends=[dict(type="LocalVisBackend")],
            ),
        )
        said = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())
        runner.logger.addHandler(handler)
        runner.train()
        assert detector.tally is None
        files = Path(tmp_path).rglob("vis_data/scalars.json")
        lines = [line for file in files for line in file.read_text().splitlines()]
        alarms = [line for line in said if line.startswith("routing until")]
        return alarms, [json.loads(line) for line in lines]

    return make


def only(expert, logits):
    return logits * 0.001 + 10 * torch.eye(logits.shape[1]).to(logits)[expert]


only_expert_1 = partial(only, 1)


def test_a_planted_collapse_is_named(train):
    alarms, curves = train(moe="vanilla", choose=only_expert_1, options={"interval": 1})
    (alarm,) = alarms
    assert alarm.startswith("routing until iteration 2: ")
    assert "decoder.0 sends 100.0% of the tokens to expert 1" in alarm
    assert [line["step"] for line in curves] == [1, 2]
    assert curves[0]["routing/decoder.0/evenness"] == pytest.approx(0.0)
    assert curves[0]["routing/decoder.0/expert_1"] == 1.0
    assert curves[0]["routing/decoder.0/expert_0"] == 0.0


def test_a_point_of_a_curve_is_of_its_iterations_alone(train):
    moe, turns = dict(layers=dict(decoder=[0]), num_experts=2), iter([1, 0])
    options = {"interval": 1}
    _, curves = train(moe=moe, choose=lambda z: only(next(turns), z), options=options)
    assert [line["routing/decoder.0/expert_0"] for line in curves] == [0.0, 1.0]


def test_teacher_forcing_does_not_hide_what_the_router_would_do(train):
    alarms, _ = train(moe="damex_best", choose=only_expert_1)
    assert "encoder.0 sends 100.0% of the tokens to expert 1" in alarms[0]


def test_short_epochs_are_judged_together(train):
    alarms, _ = train(moe="vanilla", choose=only_expert_1, by_epoch=True, max_iters=3)
    assert [line.split(":")[0] for line in alarms] == ["routing until iteration 2"]


def by_place(logits):
    """A router whose choice goes round among the experts."""
    experts = torch.arange(len(logits)) % logits.shape[1]
    return logits * 0.001 + 10 * torch.eye(logits.shape[1]).to(logits)[experts]


def test_an_even_load_is_silent(train):
    alarms, curves = train(moe="damex_best", choose=by_place)
    assert alarms == []
    assert curves[-1]["routing/decoder.0/evenness"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("moe", ["dense", "deepmoe"])
def test_a_detector_without_routed_experts_is_silent(train, moe):
    assert train(moe=None if moe == "dense" else moe) == ([], [])


def tally(counts, *, own=None):
    counts_GE = torch.tensor(counts)
    own = None if own is None else torch.tensor(own).bool()
    return LayerTally(counts_GE, counts_GE.sum(1), own)


def test_faults_by_hand():
    collapsed = tally([[98, 1, 1, 0]])
    unused = tally([[50, 50, 0, 0]])
    even = tally([[25, 25, 25, 25]])
    # 0.98 log 1/0.98 + 0.02 log 100 = 0.1119 of log 4 = 1.3863
    assert collapsed.evenness == pytest.approx(0.0807, abs=1e-4)
    layers = dict(a=collapsed, b=unused, c=even)
    assert routing_problems(layers, least_evenness=0.2) == [
        "a sends 98.0% of the tokens to expert 0",
        "b sends no token to experts 2, 3",
    ]
    assert routing_problems(layers, least_evenness=0.05) == [
        "a sends no token to expert 3",
        "b sends no token to experts 2, 3",
    ]


def test_a_layer_that_saw_nothing_is_no_fault():
    assert routing_problems(dict(a=tally([[0, 0]])), least_evenness=0.2) == []


def test_many_experts_have_no_curves_of_their_own():
    found = routing_scalars(dict(a=tally([[1] * 17]), b=tally([[3, 1]])))
    assert list(found) == [
        *("routing/a/evenness", "routing/b/evenness"),
        *("routing/b/expert_0", "routing/b/expert_1"),
    ]
    assert found["routing/b/expert_0"] == 0.75


@pytest.mark.parametrize("options", [{"interval": 0}, {"least_evenness": 1.0}])
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match="RoutingAlarmHook"):
        RoutingAlarmHook(**options)
