import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from damex.moe import ShallowEmbedding


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


def test_a_mask_of_only_real_pixels_is_no_mask(net):
    batch_BCHW, mask_BHW = images((16, 16), (16, 16), padded=(16, 16))
    first_BE = net(batch_BCHW, mask_BHW)
    torch.testing.assert_close(first_BE, net(batch_BCHW))


def test_it_is_convolutions_mean_and_one_linear_layer():
    net = ShallowEmbedding(2, widths=(3,)).eval()
    x_BCHW = torch.randn(2, 3, 9, 6, generator=torch.Generator().manual_seed(0))
    conv = functional.conv2d(x_BCHW, net.convs[0].weight, stride=2, padding=1)
    assert conv.shape[2:] == (5, 3)
    # Fresh batch norm in evaluation divides by sqrt(1 + 1e-5).
    mean_BC = (conv / (1 + 1e-5) ** 0.5).clamp(min=0).mean(dim=(2, 3))
    torch.testing.assert_close(net(x_BCHW), net.fc(mean_BC))


def test_flops_by_hand():
    # 3 -> 4 on 8 x 8 outputs and 4 -> 8 on 4 x 4, of 9 products each, and 8 x 5.
    products = 3 * 4 * 9 * 64 + 4 * 8 * 9 * 16 + 8 * 5
    net = ShallowEmbedding(5, widths=(4, 8)).eval()
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, 3, 16, 16))
    assert counter.get_total_flops() == 2 * products


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(embed_dims=0), "needs positive embed_dims"),
        (dict(embed_dims=2, widths=()), "one or more positive widths"),
        (dict(embed_dims=2, widths=(4, 0)), r"got 2, 3 and \[4, 0\]"),
    ],
)
def test_bad_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ShallowEmbedding(**arguments)


def test_a_mask_of_another_size_is_refused(net):
    with pytest.raises(ValueError, match=r"bool of shape \(1, 8, 8\), got torch.bool"):
        net(torch.zeros(1, 3, 8, 8), torch.ones(1, 8, 9, dtype=torch.bool))
