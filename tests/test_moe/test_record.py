"""Tests of damex.moe.record."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from damex.moe import RoutingRecord, TopKGate


def make_record(mask_T=None):
    logits = torch.tensor([[1.0, 3.0], [1.0, 1.0]]).log().requires_grad_()
    assignment = TopKGate(1)(logits.unsqueeze(0))
    return RoutingRecord(
        logits_TE=logits,
        token_mask_T=mask_T,
        group_ids_T=torch.tensor([0, 1]),
        assignment=assignment,
        losses={"a": logits.sum()},
    )


def test_probabilities():
    torch.testing.assert_close(
        make_record().probs_TE, torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    )


def test_valid_mask_without_and_with_mask():
    assert make_record().valid_mask().tolist() == [True, True]
    mask = torch.tensor([True, False])
    assert make_record(mask).valid_mask().tolist() == [True, False]


def test_detached_has_no_graph_and_leaves_the_original_alone():
    record = make_record()
    detached = record.detached()
    tensors = [
        detached.logits_TE,
        detached.assignment.weight_R,
        detached.losses["a"],
        detached.probs_TE,
    ]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert record.losses["a"].requires_grad
    assert record.assignment.weight_R.requires_grad
    assert torch.equal(detached.group_ids_T, record.group_ids_T)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_record().losses = {}
