"""None"""

import math

import pytest
import torch
from torch.nn import functional

from damex.moe import active_share, gate_l1, presence_loss


def test_l1_is_summed_over_channels_and_layers_and_averaged_over_images():
    first_BC = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.5, 0.0]])
    second_BC = torch.tensor([[0.25, 0.0], [0.0, 4.0]])
    # Image 0: 3 + 0.25; image 1: 1 + 4; mean 4.125.
    assert gate_l1([first_BC, second_BC]).item() == 4.125


def test_l1_needs_a_layer():
    with pytest.raises(ValueError, match="one or more layers"):
        gate_l1([])


def test_one_class_per_image_is_the_cross_entropy_of_the_paper():
    logits_BE = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    target_B = torch.tensor([0, 4, 2, 2])
    present_BE = functional.one_hot(target_B, 5).bool()
    torch.testing.assert_close(
        presence_loss(logits_BE, present_BE),
        functional.cross_entropy(logits_BE, target_B),
    )


def test_several_classes_share_the_target():
    # Image 0: probabilities 1/2, 1/4, 1/4, target 1/2, 1/2, 0:
    # (ln 2 + ln 4) / 2 = 1.5 ln 2. Image 1 has no class and does not count.
    logits_BE = torch.tensor([[math.log(2.0), 0.0, 0.0], [3.0, 1.0, 0.0]])
    present_BE = torch.tensor([[True, True, False], [False, False, False]])
    loss = presence_loss(logits_BE, present_BE)
    assert loss.item() == pytest.approx(1.5 * math.log(2.0))


def test_it_leaves_the_mean_of_the_embedding_free():
    """A pull on the mean would open or shut all channels at once."""
    logits_BE = torch.randn(3, 5, requires_grad=True)
    present_BE = torch.rand(3, 5) < 0.5
    presence_loss(logits_BE, present_BE).backward()
    torch.testing.assert_close(logits_BE.grad.sum(dim=1), torch.zeros(3))


def test_a_batch_without_classes_is_zero_with_a_gradient():
    logits_BE = torch.randn(2, 3, requires_grad=True)
    loss = presence_loss(logits_BE, torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits_BE.grad, torch.zeros(2, 3))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) of the logits, got \(2, 4\)"):
        presence_loss(torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.bool))


FIRST = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.0, 0.5], [0.0, 0.0, 9.0]])
SECOND = torch.tensor([[0.25, 0.0], [4.0, 0.0], [4.0, 0.0]])


def test_active_share_by_hand():
    # Open: 2 + 2 + 1 of 9 and 1 + 1 + 1 of 6.
    assert active_share([FIRST, SECOND]).item() == torch.tensor(8 / 15).item()
