"""Tests of damex.moe.shared_expert."""

from __future__ import annotations

import torch
from torch import nn

from damex.moe import FFNExperts, LinearRouter, MoELayer, SharedExpert, TopKGate


def test_every_real_token_passes_the_expert():
    shared = SharedExpert(4, 6, activation="gelu")
    first, second = nn.Linear(4, 6), nn.Linear(6, 4)
    shared.expert.load_dense(first.weight, first.bias, second.weight, second.bias)
    tokens = torch.randn(5, 4)
    expected = second(nn.functional.gelu(first(tokens)))
    torch.testing.assert_close(shared(tokens), expected)
    tokens[2] = torch.nan
    mask = torch.tensor([True, True, False, True, True])
    out = shared(tokens, mask)
    assert torch.equal(out[2], torch.zeros(4))
    torch.testing.assert_close(out[mask], expected[mask])


def test_a_layer_adds_it_with_weight_one_and_routes_as_before():
    torch.manual_seed(0)
    parts = dict(
        router=LinearRouter(4, 3), gate=TopKGate(1), experts=FFNExperts(3, 4, 6)
    )
    shared = SharedExpert(4, 8)
    tokens = torch.randn(2, 5, 4)
    plain, record = MoELayer(**parts)(tokens)
    both, shared_record = MoELayer(**parts, shared_expert=shared)(tokens)
    expected = plain + shared(tokens.flatten(0, 1)).view(2, 5, 4)
    torch.testing.assert_close(both, expected)
    assert torch.equal(record.assignment.counts_E, shared_record.assignment.counts_E)


def test_reset_of_the_layer_reaches_it():
    layer = MoELayer(
        router=LinearRouter(4, 3),
        gate=TopKGate(1),
        experts=FFNExperts(3, 4, 6),
        shared_expert=SharedExpert(4, 6),
    )
    nn.init.constant_(layer.shared_expert.expert.w1_EDH, 7.0)
    layer.reset_parameters()
    assert (layer.shared_expert.expert.w1_EDH != 7.0).all()
