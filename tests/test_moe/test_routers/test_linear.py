"""Tests of damex.moe.routers.linear."""

from __future__ import annotations

import pytest
import torch

from damex.moe import LinearRouter


def test_logits_by_hand():
    router = LinearRouter(2, 3, bias=True)
    with torch.no_grad():
        router.weight_ED.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, -1.0]]))
        router.bias_E.copy_(torch.tensor([0.0, 0.5, 0.0]))
    logits = router(torch.tensor([[[3.0, 4.0]]]))
    assert logits.tolist() == [[[3.0, 8.5, -1.0]]]


def test_no_bias_by_default():
    assert [name for name, _ in LinearRouter(4, 2).named_parameters()] == ["weight_ED"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computes_in_float32_under_autocast_and_in_half_models(dtype):
    torch.manual_seed(0)
    router = LinearRouter(64, 8, bias=True, init_std=1.0).to(dtype)
    tokens = torch.randn(5, 64).to(dtype)
    expected = tokens.float() @ router.weight_ED.float().T + router.bias_E.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = router(tokens)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_float64_is_kept():
    logits = LinearRouter(4, 2).double()(torch.randn(3, 4, dtype=torch.float64))
    assert logits.dtype == torch.float64


def test_initialisation_and_reset():
    torch.manual_seed(0)
    router = LinearRouter(256, 64, bias=True, init_std=0.05)
    assert abs(router.weight_ED.std().item() - 0.05) < 0.002
    with torch.no_grad():
        router.weight_ED.fill_(7.0)
        router.bias_E.fill_(7.0)
    router.reset_parameters()
    assert abs(router.weight_ED.std().item() - 0.05) < 0.002
    assert (router.bias_E == 0).all()
    assert (LinearRouter(8, 4, init_std=0.0).weight_ED == 0).all()


def test_errors():
    with pytest.raises(ValueError, match="got 0 and 4"):
        LinearRouter(0, 4)
    with pytest.raises(ValueError, match=r"init_std must be >= 0, got -0.1"):
        LinearRouter(4, 4, init_std=-0.1)
