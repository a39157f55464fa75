import copy

import pytest
import torch

from damex.models.context import RoutingContext
from damex.moe import ChannelGates


def test_nothing_is_left_over_after_a_step():
    context = RoutingContext()
    context.add("decoder.0", object())  # outside of a step
    gates = ChannelGates(torch.zeros(2, 1), layers={"encoder.0": torch.ones(2, 3)})
    with context.step(torch.tensor([0, 1]), gates=gates):
        assert context.records == {}
        assert context.layer_gates("encoder.0") is gates.layers["encoder.0"]
        with context.component(torch.tensor([[True, False]] * 2)):
            assert context.packing.position_V.tolist() == [0, 2]
        assert context.packing is None
        context.add("decoder.0", object())
        assert list(context.records) == ["decoder.0"]
    assert (context.group_ids_B, context.records) == (None, {})
    with pytest.raises(RuntimeError, match="call its loss, predict or forward"):
        context.layer_gates("encoder.0")


def test_a_failed_step_leaves_nothing_and_steps_do_not_nest():
    context = RoutingContext()
    with (
        pytest.raises(RuntimeError, match="do not nest"),
        context.step(torch.ones(1)),
        context.component(torch.ones(1, 1, dtype=torch.bool)),
        context.step(),
    ):
        pass
    assert context.packing is None
    assert (context.group_ids_B, context.records) == (None, {})
    with context.step():
        assert context.records == {}


def test_layers_of_a_copied_model_share_the_copied_context():
    context = RoutingContext()
    first, second = copy.deepcopy([context, context])
    assert first is second
    assert first is not context
