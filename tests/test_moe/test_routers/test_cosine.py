"""Tests of damex.moe.routers.cosine."""

from __future__ import annotations

import math

import pytest
import torch

from damex.moe import CosineRouter


def test_logits_by_hand():
    router = CosineRouter(2, 2, proj_dims=2, init_temperature=0.5)
    with torch.no_grad():
        router.proj_PD.copy_(torch.eye(2))
        router.bias_P.zero_()
        router.key_EP.copy_(torch.tensor([[2.0, 0.0], [3.0, 3.0]]))
    # (3, 4) has length 5: cosines 3/5 and (3 + 4) / (5 * sqrt 2), divided by 0.5
    logits = router(torch.tensor([[3.0, 4.0]]))
    expected = torch.tensor([[1.2, 14 / (5 * math.sqrt(2))]])
    torch.testing.assert_close(logits, expected)


def test_lengths_of_tokens_and_keys_do_not_count():
    router = CosineRouter(4, 3, proj_dims=5)
    with torch.no_grad():
        router.bias_P.zero_()
    tokens = torch.randn(6, 4)
    logits = router(tokens)
    torch.testing.assert_close(router(100 * tokens), logits)
    with torch.no_grad():
        router.key_EP.mul_(7.0)
    torch.testing.assert_close(router(tokens), logits)
    assert logits.abs().max() <= 2.0


def test_temperature_is_learned_and_has_a_floor():
    router = CosineRouter(4, 3, init_temperature=0.1, min_temperature=0.05)
    assert router.temperature.item() == pytest.approx(0.1)
    router(torch.randn(5, 4)).square().sum().backward()
    assert router.log_scale.grad > 0
    with torch.no_grad():
        router.log_scale.add_(9.0)
    assert router.temperature.item() == pytest.approx(0.05)
    assert router(torch.randn(5, 4)).abs().max() <= 20.0 * (1 + 1e-6)


def test_a_zero_token_has_a_direction_and_finite_gradients():
    router = CosineRouter(4, 3)
    tokens = torch.zeros(1, 4, requires_grad=True)
    router(tokens)[0, 0].backward()
    assert 0 < tokens.grad.abs().max() < 100


def test_errors():
    with pytest.raises(ValueError, match="positive, got 4 and 2 and 0"):
        CosineRouter(4, 2, proj_dims=0)
    with pytest.raises(ValueError, match=r"got 0.01 and 0.001"):
        CosineRouter(4, 2, init_temperature=0.001)
    with pytest.raises(ValueError, match=r"got 0.0 and 0.5"):
        CosineRouter(4, 2, min_temperature=0.0)
