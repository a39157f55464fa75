import copy

import pytest
import torch

from damex.models.context import RoutingContext


def test_nothing_is_left_over_after_a_step():
    context = RoutingContext()
    with context.step(torch.tensor([0, 1])):
        with context.component(torch.tensor([[True, False]] * 2)):
            assert context.packing.position_V.tolist() == [0, 2]
        assert context.packing is None
        context.add("decoder.0", object())
        assert list(context.records) == ["decoder.0"]
    assert context.group_ids_B is None
    assert context.records == {}


def test_a_failed_step_leaves_nothing_either():
    context = RoutingContext()
    with pytest.raises(ZeroDivisionError):
        _fail_inside_of_a_step(context)
    assert context.group_ids_B is None
    with context.step():
        assert context.records == {}


def _fail_inside_of_a_step(context):
    with context.step(torch.tensor([0])):
        context.add("decoder.0", object())
        raise ZeroDivisionError


def test_steps_do_not_nest():
    context = RoutingContext()
    with (
        context.step(),
        pytest.raises(RuntimeError, match="do not nest"),
        context.step(),
    ):
        pass


def test_records_outside_of_a_step_are_not_kept():
    context = RoutingContext()
    context.add("decoder.0", object())
    assert context.records == {}


def test_layers_of_a_copied_model_share_the_copied_context():
    context = RoutingContext()
    first, second = copy.deepcopy([context, context])
    assert first is second
    assert first is not context
