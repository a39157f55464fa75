"""Tests of damex.moe.losses.separate_router."""

from __future__ import annotations

import pytest
import torch

from damex.moe import (
    FFNExperts,
    LinearRouter,
    MoELayer,
    SeparateRouterLoss,
    TopKGate,
    separate_router_loss,
)


def test_by_hand():
    logits_TG = torch.tensor([[1.0, 3.0], [2.0, -1.0], [0.5, 0.0]])
    labels_T = torch.tensor([0, 0, 1])
    # y * (z_0 - z_1): 1 - 3 = -2, 2 + 1 = 3, -(0.5 - 0) = -0.5; mean 0.5 / 3
    loss = separate_router_loss(logits_TG, labels_T)
    assert loss.item() == pytest.approx(-0.5 / 3)


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_gradient_descent_follows_the_closed_form_of_eq_6(steps):
    """w_0 moves by +c * mean(y * sum_j x_j) and w_1 by -c * the same."""
    torch.manual_seed(0)
    num_samples, num_patches, dims, lr = 12, 16, 5, 0.03
    patches_NJD = torch.randn(num_samples, num_patches, dims)
    y_N = torch.where(torch.rand(num_samples) < 0.5, 1.0, -1.0)
    router = LinearRouter(dims, 2, init_std=0.1)
    start_ED = router.weight_ED.detach().clone()
    optimizer = torch.optim.SGD(router.parameters(), lr=lr)
    labels_T = (y_N < 0).long().repeat_interleave(num_patches)
    for _ in range(steps):
        optimizer.zero_grad()
        separate_router_loss(
            router(patches_NJD.flatten(0, 1)), labels_T, tokens_per_sample=num_patches
        ).backward()
        optimizer.step()
    direction_D = (y_N[:, None] * patches_NJD.sum(1)).mean(0)
    moved = router.weight_ED.detach() - start_ED
    expected = steps * lr * torch.stack([direction_D, -direction_D])
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-5)


def test_the_loss_equals_eq_6_as_printed():
    torch.manual_seed(1)
    patches_NJD, w_ED = torch.randn(6, 4, 3), torch.randn(2, 3)
    y_N = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    expected = -sum(
        y * torch.dot(w_ED[0] - w_ED[1], patches.sum(0))
        for y, patches in zip(y_N, patches_NJD, strict=True)
    )
    loss = separate_router_loss(
        (patches_NJD @ w_ED.t()).flatten(0, 1),
        (y_N < 0).long().repeat_interleave(4),
        tokens_per_sample=4,
    )
    torch.testing.assert_close(loss, expected / 6)


def test_half_precision_does_not_overflow_the_sums():
    # 20,000 tokens with a logit of 30 would add up to more than float16 holds.
    logits_TG = torch.tensor([[30.0, 20.0]]).repeat(20_000, 1)
    labels_T = torch.zeros(20_000, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = separate_router_loss(logits_TG, labels_T)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-10.0, rel=1e-4)


def test_more_classes_are_the_mean_over_pairs():
    torch.manual_seed(2)
    logits_TG, labels_T = torch.randn(30, 3), torch.randint(0, 3, (30,))
    losses = []
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        rows = (labels_T == a) | (labels_T == b)
        pair_TG = logits_TG[rows][:, [a, b]]
        losses.append(separate_router_loss(pair_TG, (labels_T[rows] == b).long()))
    found = separate_router_loss(logits_TG, labels_T)
    torch.testing.assert_close(found, torch.stack(losses).mean())
    one = separate_router_loss(logits_TG, labels_T, pairs=[(0, 2)])
    torch.testing.assert_close(one, losses[1])


def test_unknown_and_padded_tokens_take_no_part():
    torch.manual_seed(3)
    logits_TG, labels_T = torch.randn(6, 2), torch.tensor([0, 1, 0, -1, 1, 0])
    valid_T = torch.tensor([True, True, True, True, False, False])
    expected = separate_router_loss(logits_TG[:3], labels_T[:3])
    dirty_TG = logits_TG.clone()
    dirty_TG[4:] = torch.nan
    torch.testing.assert_close(
        separate_router_loss(dirty_TG, labels_T, valid_T), expected
    )


def test_without_any_label_it_is_zero_and_attached():
    logits_TG = torch.randn(4, 2, requires_grad=True)
    loss = separate_router_loss(logits_TG, torch.full((4,), -1))
    loss.backward()
    assert loss.item() == 0.0
    assert logits_TG.grad.abs().sum() == 0.0


def test_on_a_record_a_group_has_the_mean_logit_of_its_experts():
    torch.manual_seed(4)
    moe = MoELayer(
        router=LinearRouter(4, 3),
        gate=TopKGate(1),
        experts=FFNExperts(3, 4, 8),
        losses=[SeparateRouterLoss(weight=2.0)],
        group_experts=[[0, 2], [1]],
    )
    tokens_BND = torch.randn(2, 5, 4)
    _, record = moe(tokens_BND, group_ids_B=torch.tensor([1, 0]))
    z = record.logits_TE
    margin_T = (z[:, 0] + z[:, 2]) / 2 - z[:, 1]
    # the first image is of group 1, the second of group 0
    expected = -2.0 * (margin_T[5:].sum() - margin_T[:5].sum()) / 10
    torch.testing.assert_close(record.losses["separate_router"], expected)


@pytest.mark.parametrize(
    ("classes", "pairs", "message"),
    [
        (1, None, "two classes or more, got 1"),
        (2, [(0, 0)], r"two different classes in \[0, 2\), got \(0, 0\)"),
        (2, [(0, 2)], r"got \(0, 2\)"),
        (2, [(0, 1, 1)], r"got \(0, 1, 1\)"),
        (2, [], r"not empty, .*got \[\]"),
    ],
)
def test_errors(classes, pairs, message):
    with pytest.raises(ValueError, match=message):
        separate_router_loss(
            torch.zeros(3, classes), torch.zeros(3, dtype=torch.int64), pairs=pairs
        )
