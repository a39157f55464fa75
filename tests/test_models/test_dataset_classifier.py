import math

import pytest
import torch

from damex.models.dataset_classifier import (
    DatasetHead,
    annotated_classes,
    class_log_prior,
    condition_on_dataset,
    dataset_loss,
    ignore_unannotated,
    router_posterior,
)
from damex.moe import Assignment, Packing, RoutingRecord

# street: car, person; park: person, dog; sea: ship. Each is a group of its own.
BY_DATASET, _ = annotated_classes([[0, 1], [1, 2], [3]], [0, 1, 2], num_classes=4)


def test_head_starts_undecided_and_sees_real_features_alone():
    head = DatasetHead(2, 3)
    memory_BND = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [50.0, 70.0]]])
    padding_BN = torch.tensor([[False, False, True]])
    assert head(memory_BND, padding_BN).tolist() == [[0.0, 0.0, 0.0]]
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        head.bias.copy_(torch.tensor([0.0, 0.0, 10.0]))
    assert head(memory_BND, padding_BN).tolist() == [[2.0, 4.0, 16.0]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BG = head(memory_BND[:, :2].bfloat16(), None)
    assert logits_BG.dtype == torch.float32
    assert logits_BG.tolist() == [[2.0, 4.0, 16.0]]


def test_loss_leaves_unknown_images_out():
    logits_BG = torch.tensor([[0.0, math.log(3.0)], [9.0, -9.0], [0.0, math.log(3.0)]])
    logits_BG.requires_grad_()
    loss, accuracy = dataset_loss(logits_BG, torch.tensor([1, -1, 0]))
    assert loss.item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 4)) / 2)
    assert accuracy.item() == 0.5
    loss, accuracy = dataset_loss(logits_BG, torch.tensor([-1, -1, -1]))
    loss.backward()
    assert loss.item() == accuracy.item() == 0.0
    assert (logits_BG.grad == 0).all()


def test_classes_of_datasets_and_groups():
    """A group annotates what any of its datasets does; datasets of it may differ."""
    annotated_SC, annotated_GC = annotated_classes(
        [[0, 1], [3], [1, 2]], [0, 1, 0], num_classes=4
    )
    assert annotated_SC.int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 1], [0, 1, 1, 0]]
    assert annotated_GC.int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 1]]


def test_classes_are_ignored_image_by_image_in_all_layers():
    ids_B = torch.tensor([0, -1, 2])  # -1 is unknown: nothing is ignored
    logits_LBQC = ignore_unannotated(torch.zeros(5, 3, 3, 4), ids_B, BY_DATASET)
    assert logits_LBQC[2, :, 1].tolist() == [
        [0, 0, -1e4, -1e4],
        [0] * 4,
        [-1e4] * 3 + [0],
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ignored_scores_are_finite_zeros_in_every_type(dtype):
    logits_BQC = torch.randn(2, 3, 4).to(dtype)
    none_SC = torch.zeros(1, 4, dtype=torch.bool)
    ignored = ignore_unannotated(logits_BQC, torch.zeros(2, dtype=torch.long), none_SC)
    assert ignored.isfinite().all()
    assert ignored.dtype == dtype
    assert (ignored.sigmoid() == 0).all()


def test_prior_by_hand():
    posterior_BG = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.0, 1.0]])
    prior_BC = class_log_prior(posterior_BG, BY_DATASET, floor=0.01)
    torch.testing.assert_close(
        prior_BC.exp(),
        torch.tensor([[0.7, 0.9, 0.2, 0.1], [0.01, 0.01, 0.01, 1.0]]),
    )


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


@pytest.mark.parametrize("refine", [True, False])
def test_a_given_dataset_leaves_the_choice_of_objects_alone(
    build_mmdet, make_batch, refine
):
    """Column 0 of the first stage is any object; without refinement, it is shared."""
    staged = dict(as_two_stage=True, with_box_refine=refine)
    detector, chosen = build_mmdet("MoEDeformableDETR", **staged).eval(), []
    step = detector.pre_decoder
    detector.pre_decoder = lambda *a, **k: chosen.append(step(*a, **k)) or chosen[-1]
    with torch.inference_mode():
        detector.test_step(make_batch([None]))
        with condition_on_dataset(detector, [1]):
            (found,) = detector.test_step(make_batch([None]))
    for all_classes, given in zip(*(one[0].values() for one in chosen), strict=True):
        torch.testing.assert_close(given, all_classes)
    assert {*found.pred_instances.labels.tolist()} == {1}
