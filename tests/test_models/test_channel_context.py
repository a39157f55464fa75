import pytest
import torch

from damex.models.channel_context import ChannelContext
from damex.moe import ChannelGates


def test_gates_are_known_during_the_step_only():
    context = ChannelContext()
    gates = ChannelGates(
        logits_BE=torch.zeros(1, 2), layers={"encoder.0": torch.ones(1, 3)}
    )
    with context.step(gates):
        assert context.gates is gates
        assert context.layer("encoder.0") is gates.layers["encoder.0"]
    with pytest.raises(RuntimeError, match="only inside of a step"):
        context.layer("encoder.0")


def test_an_error_in_a_step_leaves_nothing_behind():
    context = ChannelContext()
    with pytest.raises(KeyError), context.step(ChannelGates(torch.zeros(1), {})):
        context.layer("decoder.9")
    with pytest.raises(RuntimeError, match="call the detector's loss, predict"):
        _ = context.gates
