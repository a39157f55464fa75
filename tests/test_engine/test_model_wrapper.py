"""What the runner fills in around a model; test_two_processes.py trains with it."""

import pytest
from mmengine.runner import Runner
from torch import nn

from damex.engine.runner import MixtureRunner

STAGED, PLAIN = nn.Module(), nn.Module()
STAGED.trains_in_stages, PLAIN.trains_in_stages = True, False


@pytest.fixture
def wrap(monkeypatch):
    """What reaches mmengine of a wrapper's config."""
    monkeypatch.setattr(Runner, "wrap_model", lambda self, wrapper, model: wrapper)
    monkeypatch.setattr("damex.engine.runner.get_device", lambda: "cuda")

    def call(wrapper, model, *, distributed=True, **cfg):
        runner = object.__new__(MixtureRunner)
        runner._distributed, runner.cfg = distributed, cfg
        return runner.wrap_model(wrapper, model)

    return call


@pytest.mark.parametrize(
    ("model", "cfg", "unused"),
    [
        (PLAIN, {}, False),
        (PLAIN, dict(find_unused_parameters=True), True),
        (STAGED, {}, True),
        (STAGED, dict(find_unused_parameters=False), True),
        (nn.Identity(), {}, False),
    ],
)
def test_a_stage_looks_for_unused_parameters(wrap, model, cfg, unused):
    assert wrap(None, model, **cfg) == dict(
        type="MMDistributedDataParallel",
        broadcast_buffers=False,
        find_unused_parameters=unused,
    )


def test_a_wrapper_of_the_config_keeps_what_it_sets(wrap):
    own = dict(find_unused_parameters=False, broadcast_buffers=True)
    assert wrap(own, STAGED) == dict(own, type="MMDistributedDataParallel")
    assert own == dict(find_unused_parameters=False, broadcast_buffers=True)
    other = dict(type="MMFullyShardedDataParallel")
    assert wrap(other, STAGED) == other


def test_without_a_gpu_there_is_no_device_id_unless_one_is_set(wrap, monkeypatch):
    monkeypatch.setattr("damex.engine.runner.get_device", lambda: "cpu")
    assert wrap(None, PLAIN)["device_ids"] is None
    assert wrap(dict(device_ids=[0]), PLAIN)["device_ids"] == [0]


def test_one_process_needs_no_wrapper(wrap):
    assert wrap(None, STAGED, distributed=False) is None
