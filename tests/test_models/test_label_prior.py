import math

import pytest
import torch
from mmdet.models.losses import FocalLoss

from damex.models.label_prior import (
    LabelCoverage,
    class_log_prior,
    ignore_classes,
    router_posterior,
    unannotated_classes,
)
from damex.moe import Assignment, Packing, RoutingRecord

# street: car, person; park: person, dog; sea: ship
COVERAGE = LabelCoverage(labels=[[0, 1], [1, 2], [3]], groups=[0, 1, 2])


def test_coverage_by_dataset():
    assert COVERAGE.by_dataset(4).tolist() == [
        [True, True, False, False],
        [False, True, True, False],
        [False, False, False, True],
    ]


def test_a_group_annotates_what_any_of_its_datasets_does():
    coverage = LabelCoverage(labels=[[0, 1], [3], [1, 2]], groups=[0, 1, 0])
    assert coverage.num_groups == 2
    assert coverage.by_group(4).tolist() == [
        [True, True, True, False],
        [False, False, False, True],
    ]


def test_classes_are_foreign_by_dataset_not_by_group():
    """Datasets of one group may annotate different classes all the same."""
    coverage = LabelCoverage(labels=[[0, 1], [1, 2]], groups=[0, 0])
    unannotated_BC = unannotated_classes(torch.tensor([1, 0]), coverage.by_dataset(3))
    assert unannotated_BC.tolist() == [[True, False, False], [False, False, True]]


def test_no_class_is_foreign_to_an_image_of_unknown_origin():
    unannotated_BC = unannotated_classes(torch.tensor([-1, 2]), COVERAGE.by_dataset(4))
    assert unannotated_BC.tolist() == [[False] * 4, [True, True, True, False]]


def test_the_naive_loss_unlearns_what_another_dataset_teaches():
    """An image of the park shows a car, which the park does not annotate.

    Background at p = 1/2: the focal loss (gamma 2, alpha 1/4) is -3/4 p^2 log(1 - p).
    Its slope in the logit, 3/4 (2 p^2 (1 - p) log 2 + p^3) = 0.2237, pushes car down.
    """
    loss = FocalLoss(use_sigmoid=True, gamma=2.0, alpha=0.25, reduction="sum")
    unannotated_BC = unannotated_classes(torch.tensor([1]), COVERAGE.by_dataset(4))
    slopes, values = [], []
    for mask in (torch.zeros_like(unannotated_BC), unannotated_BC):
        logits_BQC = torch.zeros(1, 1, 4, requires_grad=True)
        ignored_QC = ignore_classes(logits_BQC, mask)[0]
        value = loss(ignored_QC, torch.tensor([4]))  # 4: background
        value.backward()
        slopes.append(logits_BQC.grad[0, 0])
        values.append(value.item())
    slope = 0.75 * (2 * 0.5**3 * math.log(2) + 0.5**3)
    torch.testing.assert_close(slopes[0], torch.full((4,), slope))
    torch.testing.assert_close(slopes[1], torch.tensor([0.0, slope, slope, 0.0]))
    assert slopes[1][0] == slopes[1][3] == 0.0
    each = 0.75 * 0.25 * math.log(2)
    assert values == pytest.approx([4 * each, 2 * each])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ignored_scores_are_finite_zeros_in_every_type(dtype):
    logits_BQC = torch.randn(2, 3, 4).to(dtype)
    ignored = ignore_classes(logits_BQC, torch.ones(2, 4, dtype=torch.bool))
    assert ignored.isfinite().all()
    assert ignored.dtype == dtype
    assert (ignored.sigmoid() == 0).all()


def test_classes_are_ignored_image_by_image_in_all_layers():
    unannotated_BC = unannotated_classes(torch.tensor([0, 2]), COVERAGE.by_dataset(4))
    ignored_LBQC = ignore_classes(torch.zeros(5, 2, 3, 4), unannotated_BC)
    expected_BC = torch.where(unannotated_BC, -1e4, 0.0)
    assert torch.equal(ignored_LBQC[2, :, 1], expected_BC)


def test_prior_by_hand():
    posterior_BG = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.0, 1.0]])
    prior_BC = class_log_prior(posterior_BG, COVERAGE.by_group(4), floor=0.01)
    torch.testing.assert_close(
        prior_BC.exp(),
        torch.tensor([[0.7, 0.9, 0.2, 0.1], [0.01, 0.01, 0.01, 1.0]]),
    )


def test_without_a_floor_a_sure_posterior_shuts_unannotated_classes_out():
    posterior_BG = torch.tensor([[0.0, 1.0, 0.0]])
    prior_BC = class_log_prior(posterior_BG, COVERAGE.by_group(4), floor=0.0)
    assert prior_BC.tolist() == [[-math.inf, 0.0, 0.0, -math.inf]]


def test_a_class_that_all_annotate_is_left_alone_exactly():
    annotated_GC = torch.tensor([[True, True], [True, False], [True, False]])
    posterior_BG = torch.randn(50, 3).softmax(dim=1)
    prior_BC = class_log_prior(posterior_BG, annotated_GC, floor=1e-4)
    assert (prior_BC[:, 0] == 0).all()
    assert (prior_BC[:, 1] < 0).all()


def record_of(logits_VE, packing, group_experts):
    return RoutingRecord(
        logits_VE=logits_VE,
        packing=packing,
        assignment=Assignment.from_topk(
            torch.zeros(len(logits_VE), 1, dtype=torch.long),
            torch.ones(len(logits_VE), 1),
            num_experts=logits_VE.shape[1],
        ),
        group_experts_GE=group_experts,
    )


def test_posterior_of_a_router_by_hand():
    """Two images, the second with one real token; group 0 has two experts."""
    groups_GE = torch.tensor([[True, True, False], [False, False, True]])
    packing = Packing.of_mask(torch.tensor([[True, True], [False, True]]))
    probs_VE = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6], [0.2, 0.2, 0.6]])
    posterior_BG = router_posterior(record_of(probs_VE.log(), packing, groups_GE))
    torch.testing.assert_close(posterior_BG, torch.tensor([[0.6, 0.4], [0.4, 0.6]]))


def test_groups_that_share_an_expert_still_sum_to_one():
    groups_GE = torch.tensor([[True, True, False], [False, True, True]])
    probs_VE = torch.tensor([[0.5, 0.3, 0.2]])
    posterior_BG = router_posterior(record_of(probs_VE.log(), Packing(1, 1), groups_GE))
    torch.testing.assert_close(posterior_BG, torch.tensor([[0.8, 0.5]]) / 1.3)


def test_a_router_without_groups_says_nothing():
    with pytest.raises(ValueError, match="no map of dataset groups"):
        router_posterior(record_of(torch.zeros(1, 2), Packing(1, 1), None))
