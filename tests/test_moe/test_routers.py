"""Tests of damex.moe.routers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from damex.moe import (
    CosineRouter,
    DatasetRoutingLoss,
    HierarchicalRouter,
    LinearRouter,
    MLPRouter,
    Packing,
    RoutingRecord,
    TopKGate,
    expert_groups,
)


def test_logits_by_hand():
    router = LinearRouter(2, 3, bias=True)
    with torch.no_grad():
        router.weight_ED.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, -1.0]]))
        router.bias_E.copy_(torch.tensor([0.0, 0.5, 0.0]))
    logits = router(torch.tensor([[[3.0, 4.0]]]))
    assert logits.tolist() == [[[3.0, 8.5, -1.0]]]


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
def test_mlp_logits_by_hand(activation, of_one, of_minus_one):
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


def test_cosine_logits_by_hand():
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


def test_softmax_is_the_product_of_both_levels_by_hand():
    router = HierarchicalRouter(2, 3, num_groups=2, init_std=0.0)
    with torch.no_grad():
        router.group_bias_G.copy_(torch.tensor([math.log(3.0), 0.0]))
        # the common 7 of group 0 cancels inside of the group
        router.bias_E.copy_(torch.tensor([7.0, 7.0 + math.log(4.0), -5.0]))
    # groups (0, 1) and (2,): 3/4 * 1/5, 3/4 * 4/5 and 1/4 * 1
    logits = router(torch.randn(1, 2))
    torch.testing.assert_close(logits.exp(), torch.tensor([[0.15, 0.6, 0.25]]))


@pytest.mark.parametrize(
    ("num_groups", "num_experts"), [(1, 4), (2, 5), (3, 3), (3, 7), (4, 10)]
)
def test_product_of_levels_for_any_sizes(num_groups, num_experts):
    torch.manual_seed(0)
    router = HierarchicalRouter(4, num_experts, num_groups=num_groups, init_std=1.0)
    tokens = torch.randn(2, 3, 4)
    probs = router(tokens).softmax(-1)
    outer = functional.linear(tokens, router.group_weight_GD).softmax(-1)
    for g, group in enumerate(expert_groups(num_groups, num_experts)):
        inner = functional.linear(tokens, router.weight_ED[list(group)]).softmax(-1)
        torch.testing.assert_close(probs[..., group], outer[..., g, None] * inner)


def test_dataset_loss_teaches_the_first_level_alone():
    torch.manual_seed(0)
    router = HierarchicalRouter(4, 5, num_groups=2, init_std=1.0).double()
    tokens = torch.randn(6, 4, dtype=torch.float64)
    target = torch.tensor([0, 1, 1, 0, 1, 0])
    mask_GE = torch.zeros(2, 5, dtype=torch.bool)
    mask_GE[0, :3], mask_GE[1, 3:] = True, True
    logits = router(tokens)
    record = RoutingRecord(
        logits_VE=logits,
        packing=Packing(1, 6),
        assignment=TopKGate()(logits),
        group_ids_V=target,
        group_experts_GE=mask_GE,
    )
    loss = DatasetRoutingLoss()(record)
    group_logits = functional.linear(tokens, router.group_weight_GD)
    torch.testing.assert_close(loss, functional.cross_entropy(group_logits, target))
    loss.backward()
    # zero in exact arithmetic; what is left is rounding
    for second_level in (router.weight_ED, router.bias_E):
        assert second_level.grad.abs().max() < 1e-16
    assert (router.group_weight_GD.grad != 0).all()


def test_large_logits_stay_finite_in_value_and_gradient():
    router = HierarchicalRouter(4, 5, num_groups=2, init_std=1e3)
    tokens = torch.randn(5, 4, requires_grad=True)
    logits = router(tokens)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert tokens.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in router.parameters())
