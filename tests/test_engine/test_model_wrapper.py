"""What is filled in around a model; test_two_processes.py trains with it."""

import pytest
from torch import nn

from damex.engine.sharding import wrapper_config

STAGED, PLAIN = nn.Module(), nn.Module()
STAGED.trains_in_stages, PLAIN.trains_in_stages = True, False


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr("damex.engine.sharding.get_device", lambda: "cuda")


@pytest.mark.parametrize(
    ("model", "cfg", "unused"),
    [
        (PLAIN, {}, False),
        (PLAIN, dict(find_unused_parameters=True), True),
        (STAGED, dict(find_unused_parameters=False), True),
        (nn.Identity(), {}, False),
    ],
)
def test_a_stage_looks_for_unused_parameters(model, cfg, unused):
    assert wrapper_config(None, model, cfg) == dict(
        type="MMDistributedDataParallel",
        broadcast_buffers=False,
        find_unused_parameters=unused,
    )


def test_a_wrapper_of_the_config_keeps_what_it_sets():
    own = dict(find_unused_parameters=False, broadcast_buffers=True)
    found = wrapper_config(own, STAGED, {})
    assert found == dict(own, type="MMDistributedDataParallel")
    assert own == dict(find_unused_parameters=False, broadcast_buffers=True)
    other = dict(type="MMFullyShardedDataParallel")
    assert wrapper_config(other, STAGED, {}) == other


def test_without_a_gpu_there_is_no_device_id_unless_one_is_set(monkeypatch):
    monkeypatch.setattr("damex.engine.sharding.get_device", lambda: "cpu")
    assert wrapper_config(None, PLAIN, {})["device_ids"] is None
    assert wrapper_config(dict(device_ids=[0]), PLAIN, {})["device_ids"] == [0]
