import math

import pytest
import torch

from damex.models.dataset_head import DatasetConditioning, DatasetHead, dataset_loss


def test_head_starts_undecided_and_sees_real_features_alone():
    head = DatasetHead(2, 3)
    memory_BND = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [50.0, 70.0]]])
    padding_BN = torch.tensor([[False, False, True]])
    assert head(memory_BND, padding_BN).tolist() == [[0.0, 0.0, 0.0]]
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        head.bias.copy_(torch.tensor([0.0, 0.0, 10.0]))
    assert head(memory_BND, padding_BN).tolist() == [[2.0, 4.0, 16.0]]
    assert head(memory_BND[:, :2], None).tolist() == [[2.0, 4.0, 16.0]]


def test_head_stays_in_float32_under_autocast():
    head = DatasetHead(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(torch.zeros(1, 4, 2).bfloat16(), None).dtype == torch.float32


def test_loss_leaves_unknown_images_out():
    logits_BG = torch.tensor([[0.0, math.log(3.0)], [9.0, -9.0], [0.0, math.log(3.0)]])
    loss, accuracy = dataset_loss(logits_BG, torch.tensor([1, -1, 0]))
    assert loss.item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 4)) / 2)
    assert accuracy.item() == 0.5


def test_loss_of_unknown_images_alone_is_zero_with_a_gradient():
    logits_BG = torch.zeros(2, 3, requires_grad=True)
    loss, accuracy = dataset_loss(logits_BG, torch.tensor([-1, -1]))
    loss.backward()
    assert loss.item() == accuracy.item() == 0.0
    assert (logits_BG.grad == 0).all()


def test_conditioning_starts_as_nothing():
    conditioning = DatasetConditioning(4, 3, film=True)
    values_BND, posterior_BG = torch.randn(2, 5, 4), torch.randn(2, 3).softmax(1)
    assert torch.equal(conditioning.query(values_BND, posterior_BG), values_BND)
    assert torch.equal(conditioning.memory(values_BND, posterior_BG), values_BND)


def test_conditioning_by_hand():
    conditioning = DatasetConditioning(1, 2, film=True)
    with torch.no_grad():
        conditioning.query_GD.copy_(torch.tensor([[4.0], [8.0]]))
        conditioning.scale_GD.copy_(torch.tensor([[1.0], [-1.0]]))
        conditioning.shift_GD.copy_(torch.tensor([[10.0], [20.0]]))
    posterior_BG = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    values_BND = torch.tensor([[[2.0]], [[2.0]]])
    assert conditioning.query(values_BND, posterior_BG).flatten().tolist() == [6, 9]
    # 2 (1 + 1) + 10 and 2 (1 - 1/2) + 17.5
    assert conditioning.memory(values_BND, posterior_BG).flatten().tolist() == [
        14,
        18.5,
    ]


def test_without_film_the_memory_is_not_touched():
    conditioning = DatasetConditioning(4, 3, film=False)
    assert set(conditioning.state_dict()) == {"query_GD"}
    memory_BND = torch.randn(1, 2, 4)
    assert conditioning.memory(memory_BND, torch.ones(1, 3) / 3) is memory_BND
