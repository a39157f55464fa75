"""Tests of damex.moe.routers."""

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


def test_initialisation():
    torch.manual_seed(0)
    router = LinearRouter(256, 64, bias=True, init_std=0.05)
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


@pytest.mark.parametrize(
    ("num_groups", "num_experts"), [(1, 4), (2, 5), (3, 3), (3, 7), (4, 10)]
)
def test_product_of_levels_for_any_sizes(num_groups, num_experts):
    torch.manual_seed(0)
    router = HierarchicalRouter(4, num_experts, num_groups=num_groups, init_std=1.0)
    for bias in (router.group_bias_G, router.bias_E):
        torch.nn.init.normal_(bias)
    tokens = torch.randn(2, 3, 4)
    probs = router(tokens).exp()
    outer = tokens @ router.group_weight_GD.T + router.group_bias_G
    inner = tokens @ router.weight_ED.T + router.bias_E
    for g, group in enumerate(map(list, expert_groups(num_groups, num_experts))):
        expected = outer.softmax(-1)[..., g, None] * inner[..., group].softmax(-1)
        torch.testing.assert_close(probs[..., group], expected)


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
