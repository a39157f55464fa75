"""The gating path of DeepMoE and its losses."""

import math

import pytest
import torch
from torch.nn import functional

from damex.papers.channels import (
    ChannelGate,
    GatingPath,
    ShallowEmbedding,
    active_share,
    gate_l1,
    presence_loss,
)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return ShallowEmbedding(5, widths=(4, 8, 8))


def images(*sizes, padded, fill=7.0):
    """Images of the given sizes at the top left of a padded batch, and their mask."""
    generator = torch.Generator().manual_seed(1)
    batch_BCHW = torch.full((len(sizes), 3, *padded), fill)
    mask_BHW = torch.zeros(len(sizes), *padded, dtype=torch.bool)
    for image, (height, width) in enumerate(sizes):
        batch_BCHW[image, :, :height, :width] = torch.randn(
            3, height, width, generator=generator
        )
        mask_BHW[image, :height, :width] = True
    return batch_BCHW, mask_BHW


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_padding_changes_nothing(net, training):
    """Odd sizes, so that strides do not end at the border of the image."""
    net.train(training)
    tight, wide = {}, {}
    for found, padded, fill in ((tight, (21, 30), 0.0), (wide, (40, 37), 1e4)):
        torch.manual_seed(0)
        fresh = ShallowEmbedding(5, widths=(4, 8, 8)).train(training)
        found["out"] = fresh(*images((21, 13), (10, 30), padded=padded, fill=fill))
        found["mean"] = fresh.norms[2].running_mean
    torch.testing.assert_close(tight["out"], wide["out"])
    torch.testing.assert_close(tight["mean"], wide["mean"])


def test_a_masked_image_is_embedded_as_by_itself(net):
    net.eval()
    batch_BCHW, mask_BHW = images((21, 13), (10, 30), padded=(32, 32))
    together_BE = net(batch_BCHW, mask_BHW)
    alone_1E = net(batch_BCHW[1:, :, :10, :30])
    torch.testing.assert_close(together_BE[1:], alone_1E)
    assert not torch.allclose(net(batch_BCHW)[1:], alone_1E)  # the padding is seen


def test_it_is_convolutions_mean_and_one_linear_layer():
    net = ShallowEmbedding(2, widths=(3,)).eval()
    x_BCHW = torch.randn(2, 3, 9, 6, generator=torch.Generator().manual_seed(0))
    conv = functional.conv2d(x_BCHW, net.convs[0].weight, stride=2, padding=1)
    assert conv.shape[2:] == (5, 3)
    # Fresh batch norm in evaluation divides by sqrt(1 + 1e-5).
    mean_BC = (conv / (1 + 1e-5) ** 0.5).clamp(min=0).mean(dim=(2, 3))
    torch.testing.assert_close(net(x_BCHW), net.fc(mean_BC))


def test_gates_by_hand():
    gate = ChannelGate(2, 3)
    with torch.no_grad():
        gate.weight_CE.copy_(torch.tensor([[1.0, 2.0], [0.5, -1.0], [-1.0, 1.0]]))
    # e = (2, 1): 2+2, 1-1, -2+1; e = (-1, 1): -1+2, -0.5-1, 1+1; negative is closed.
    gates_BC = gate(torch.tensor([[2.0, 1.0], [-1.0, 1.0]]))
    assert gates_BC.tolist() == [[4.0, 0.0, 0.0], [1.0, 0.0, 2.0]]


def test_initial_weights():
    torch.manual_seed(0)
    weight_CE = ChannelGate(50, 100).weight_CE
    # Uniform on [-0.5, 1): mean 0.25, std 1.5 / sqrt(12) = 0.433.
    assert -0.5 <= weight_CE.min().item() < -0.49
    assert 0.99 < weight_CE.max().item() < 1.0
    assert weight_CE.mean().item() == pytest.approx(0.25, abs=0.02)
    assert weight_CE.std().item() == pytest.approx(0.433, abs=0.01)
    assert torch.equal(ChannelGate(2, 3, init="ones").weight_CE, torch.ones(3, 2))


def test_gates_are_full_precision_under_autocast():
    gate = ChannelGate(4, 8)
    logits_BE = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gates_BC = gate(logits_BE)
    assert torch.equal(gates_BC, gate(logits_BE))


@pytest.fixture
def path():
    torch.manual_seed(0)
    return GatingPath(ShallowEmbedding(3, widths=(4, 4)), {"stage.0": 5, "stage.1": 7})


@pytest.fixture
def images_BCHW():
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_one_embedding_feeds_a_gate_per_layer(path, images_BCHW):
    gates = path.eval()(images_BCHW)
    assert torch.equal(gates.logits_BE, path.embedding(images_BCHW))
    assert {name: g.shape for name, g in gates.layers.items()} == {
        "stage.0": (4, 5),
        "stage.1": (4, 7),
    }
    weight_CE = path.state_dict()["heads.stage_1.weight_CE"]
    expected_BC = (gates.logits_BE @ weight_CE.t()).clamp(min=0)
    torch.testing.assert_close(gates.layers["stage.1"], expected_BC)


def test_stage_one_trains_all_of_it(path, images_BCHW):
    path.train()
    gates = path(images_BCHW)
    before = path.embedding.norms[0].running_mean.clone()
    gate_l1(list(gates.layers.values())).backward()
    assert [n for n, p in path.named_parameters() if p.grad is None] == []
    path(images_BCHW)
    assert not torch.equal(path.embedding.norms[0].running_mean, before)


def test_l1_is_summed_over_channels_and_layers_and_averaged_over_images():
    first_BC = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.5, 0.0]])
    second_BC = torch.tensor([[0.25, 0.0], [0.0, 4.0]])
    # Image 0: 3 + 0.25; image 1: 1 + 4; mean 4.125.
    assert gate_l1([first_BC, second_BC]).item() == 4.125


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


FIRST = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.0, 0.5], [0.0, 0.0, 9.0]])
SECOND = torch.tensor([[0.25, 0.0], [4.0, 0.0], [4.0, 0.0]])


def test_active_share_by_hand():
    # Open: 2 + 2 + 1 of 9 and 1 + 1 + 1 of 6.
    assert active_share([FIRST, SECOND]).item() == torch.tensor(8 / 15).item()
