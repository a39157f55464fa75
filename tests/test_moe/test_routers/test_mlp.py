"""Tests of damex.moe.routers.mlp."""

from __future__ import annotations

import math

import pytest
import torch

from damex.moe import MLPRouter
from damex.moe.routers.mlp import ACTIVATIONS


@pytest.mark.parametrize(
    ("activation", "of_one", "of_minus_one"),
    [
        ("relu", 1.0, 0.0),
        ("tanh", math.tanh(1.0), -math.tanh(1.0)),
        # 1 / (1 + exp(-1)) and 1 / (1 + exp(1))
        ("sigmoid", 0.7310586, 0.2689414),
        # gelu(x) = x * Phi(x), Phi(1) = 0.8413447, Phi(-1) = 0.1586553
        ("gelu", 0.8413447, -0.1586553),
    ],
)
def test_logits_by_hand(activation, of_one, of_minus_one):
    router = MLPRouter(2, 2, hidden_dims=2, activation=activation)
    with torch.no_grad():
        router.w1_HD.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        router.b1_H.copy_(torch.tensor([-2.0, 1.0]))
        router.w2_EH.copy_(torch.tensor([[1.0, 0.0], [10.0, 2.0]]))
        router.b2_E.copy_(torch.tensor([0.5, 0.0]))
    # hidden: 3 - 2 = 1 and -2 + 1 = -1, before the activation
    logits = router(torch.tensor([3.0, -2.0]))
    expected = torch.tensor([of_one + 0.5, 10 * of_one + 2 * of_minus_one])
    torch.testing.assert_close(logits, expected)


def test_every_activation_is_tested_above():
    assert set(ACTIVATIONS) == {"relu", "tanh", "sigmoid", "gelu"}


def test_temperature_cannot_be_traded_for_the_first_layers_weights():
    # Nguyen et al. 2025: for a linear router c*w and c*tau leave the softmax unchanged
    torch.manual_seed(0)
    router = MLPRouter(4, 3, init_std=1.0).double()
    tokens = torch.randn(5, 4, dtype=torch.float64)
    before = router(tokens)
    with torch.no_grad():
        router.w1_HD.mul_(2.0)
    assert (router(tokens) / 2.0 - before).abs().max() > 1e-3


def test_hidden_width_is_that_of_the_tokens_by_default():
    assert MLPRouter(6, 3).w1_HD.shape == (6, 6)


def test_second_layer_of_std_zero_starts_all_experts_equal():
    router = MLPRouter(4, 3, init_std=0.0)
    assert torch.equal(router(torch.randn(2, 4)), torch.zeros(2, 3))


def test_errors():
    with pytest.raises(ValueError, match="positive, got 4 and 2 and 0"):
        MLPRouter(4, 2, hidden_dims=0)
    with pytest.raises(ValueError, match="unknown activation 'elu'"):
        MLPRouter(4, 2, activation="elu")
    with pytest.raises(ValueError, match=r"init_std must be >= 0, got -1.0"):
        MLPRouter(4, 2, init_std=-1.0)
