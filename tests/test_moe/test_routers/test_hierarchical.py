"""Tests of damex.moe.routers.hierarchical."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from damex.moe import HierarchicalRouter, dataset_routing_loss, expert_groups


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
    loss = dataset_routing_loss(router(tokens), mask_GE[target])
    group_logits = functional.linear(tokens, router.group_weight_GD)
    torch.testing.assert_close(loss, functional.cross_entropy(group_logits, target))
    loss.backward()
    # zero in exact arithmetic; what is left is rounding
    for second_level in (router.weight_ED, router.bias_E):
        assert second_level.grad.abs().max() < 1e-16
    assert (router.group_weight_GD.grad != 0).all()


def test_one_expert_per_group_has_no_second_level():
    router = HierarchicalRouter(4, 3, num_groups=3, init_std=1.0)
    tokens = torch.randn(5, 4)
    expected = functional.linear(tokens, router.group_weight_GD).log_softmax(-1)
    torch.testing.assert_close(router(tokens), expected)


def test_large_logits_stay_finite_in_value_and_gradient():
    router = HierarchicalRouter(4, 5, num_groups=2, init_std=1e3)
    tokens = torch.randn(5, 4, requires_grad=True)
    logits = router(tokens)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert tokens.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in router.parameters())


def test_errors():
    with pytest.raises(ValueError, match="got 0 and 4"):
        HierarchicalRouter(0, 4, num_groups=2)
    with pytest.raises(ValueError, match="got 5 groups and 4 experts"):
        HierarchicalRouter(4, 4, num_groups=5)
    with pytest.raises(ValueError, match=r"init_std must be >= 0, got -1.0"):
        HierarchicalRouter(4, 4, num_groups=2, init_std=-1.0)
