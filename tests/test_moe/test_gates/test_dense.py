"""Tests of damex.papers.dense_gates."""

import math

import pytest
import torch

from damex.papers.dense_gates import DenseToSparseGate

LOG2 = math.log(2.0)


def at(tau, **kwargs):
    kwargs.setdefault("threshold", 0.0)
    gate = DenseToSparseGate(start_temperature=tau, **kwargs)
    gate.begin_step(0.0)
    return gate


def test_temperatures_by_hand():
    gate = at(8.0, end_temperature=0.5)
    found = []
    for progress in (0.0, 0.5, 1.0):
        gate.begin_step(progress)
        found.append(gate.temperature.item())
    # 8 * (1/16)^(1/2) = 2
    assert found == pytest.approx([8.0, 2.0, 0.5])


def test_weights_by_hand():
    # logits / 0.5 = (log 4, log 16, 0): 4/21, 16/21, 1/21
    logits = torch.tensor([[LOG2, 2 * LOG2, 0.0]])
    assignment = at(0.5)(logits)
    assert assignment.expert_index_R.tolist() == [0, 1, 2]
    torch.testing.assert_close(assignment.weight_R * 21, torch.tensor([4.0, 16.0, 1.0]))
    dropped = at(0.5, threshold=0.1)(logits)
    assert dropped.expert_index_R.tolist() == [0, 1]
    torch.testing.assert_close(dropped.weight_R * 21, torch.tensor([4.0, 16.0]))


def test_limits_of_the_temperature():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    uniform = at(1e8)(logits).weight_R
    torch.testing.assert_close(uniform, torch.full((24,), 0.25))
    cold = at(1e-8, threshold=0.01)(logits)
    assert torch.equal(cold.weight_R, torch.ones(6))
    order = cold.token_index_R.argsort()
    assert torch.equal(cold.expert_index_R[order], logits.argmax(1))


def test_the_best_expert_is_kept_below_the_threshold():
    """Where experts of another group have all the weight; ties to the lowest id."""
    logits = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 2.0, 2.0]])
    logits = torch.cat([logits, torch.full((3, 1), 99.0)], dim=1)
    allowed = torch.tensor([True, True, True, False]).expand(3, 4)
    assignment = at(1.0, threshold=0.25)(logits, allowed_VE=allowed)
    assert assignment.token_index_R.tolist() == [1, 2, 0]
    assert assignment.expert_index_R.tolist() == [0, 1, 2]


def test_a_gate_that_keeps_all_routes_says_how_many_there_are():
    logits = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    all_kept = at(0.5)(logits)
    assert all_kept.routes_per_token == 3
    # The other path, with a threshold that drops nothing.
    found = at(0.5, threshold=1e-30)(logits)
    assert found.routes_per_token is None
    for name in ("token_index_R", "expert_index_R", "weight_R", "counts_E"):
        assert torch.equal(getattr(all_kept, name), getattr(found, name))


def test_training_without_progress_is_refused():
    gate, logits = DenseToSparseGate(), torch.zeros(2, 3)
    for tell in (lambda: None, lambda: gate.begin_step(None)):
        tell()
        with pytest.raises(RuntimeError, match=r"call begin_step\(progress\)"):
            gate(logits)
    gate.eval()(logits)
    gate.train().begin_step(0.0)
    gate(logits)
    # a temperature that never moves needs no progress
    DenseToSparseGate(start_temperature=1.0, end_temperature=1.0)(logits)
