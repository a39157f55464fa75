import pytest
import torch

from damex.moe import ChannelGate


def test_gates_by_hand():
    gate = ChannelGate(2, 3)
    with torch.no_grad():
        gate.weight_CE.copy_(torch.tensor([[1.0, 2.0], [0.5, -1.0], [-1.0, 1.0]]))
    # e = (2, 1): 2+2, 1-1, -2+1; e = (-1, 1): -1+2, -0.5-1, 1+1; negative is closed.
    gates_BC = gate(torch.tensor([[2.0, 1.0], [-1.0, 1.0]]))
    assert gates_BC.tolist() == [[4.0, 0.0, 0.0], [1.0, 0.0, 2.0]]


def test_initial_weights():
    torch.manual_seed(0)
    weight_CE = ChannelGate(50, 100).weight_CE
    # Uniform on [-0.5, 1): mean 0.25, std 1.5 / sqrt(12) = 0.433.
    assert -0.5 <= weight_CE.min().item() < -0.49
    assert 0.99 < weight_CE.max().item() < 1.0
    assert weight_CE.mean().item() == pytest.approx(0.25, abs=0.02)
    assert weight_CE.std().item() == pytest.approx(0.433, abs=0.01)
    assert torch.equal(ChannelGate(2, 3, init="ones").weight_CE, torch.ones(3, 2))


def test_gates_are_full_precision_under_autocast():
    gate = ChannelGate(4, 8)
    logits_BE = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gates_BC = gate(logits_BE)
    assert torch.equal(gates_BC, gate(logits_BE))


def test_an_unknown_init_is_named():
    with pytest.raises(ValueError, match=r"one of \['uniform', 'ones'\], got 'zeros'"):
        ChannelGate(2, 3, init="zeros")
