"""Convolutions and FFNs with gated channels."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from damex.papers.channels import gated_conv2d, gated_ffn


class GatedConv(nn.Module):
    """Convolution, norm, gate and ReLU, skipping closed channels in evaluation."""

    def __init__(self, conv, norm):
        super().__init__()
        self.conv, self.norm, self.activation = conv, norm, nn.ReLU()
        self.skip_closed = True

    def forward(self, x_BCHW, gates_BC, **kwargs):
        return gated_conv2d(
            x_BCHW,
            gates_BC,
            conv=self.conv,
            norm=self.norm,
            activation=self.activation,
            skip_closed=self.skip_closed and not self.training,
            **kwargs,
        )


@pytest.fixture
def x_BCHW():
    return torch.randn(2, 6, 9, 7, generator=torch.Generator().manual_seed(1))


def layer(*, norm=True, bias=False, **conv):
    """A gated 6 -> 8 convolution whose batch norm has seen something."""
    torch.manual_seed(0)
    block = GatedConv(
        nn.Conv2d(6, 8, 3, padding=1, bias=bias, **conv),
        nn.BatchNorm2d(8) if norm else None,
    )
    if norm:
        for values in (block.norm.running_mean, block.norm.bias.data):
            nn.init.normal_(values)
        for values in (block.norm.running_var, block.norm.weight.data):
            nn.init.uniform_(values, 0.5, 2.0)
    return block


def gates(*rows):
    return torch.tensor(rows)


TWO_IMAGES = gates(
    [0.5, 0.0, 2.0, 0.0, 0.0, 1.0, 0.0, 0.1], [0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
)
IN_GATES = gates([1.0, 0.0, 0.0, 2.0, 0.0, 0.3], [0.0, 0.0, 0.0, 0.0, 0.4, 0.0])


def test_the_gate_acts_between_norm_and_activation(x_BCHW):
    block = layer().eval()
    # With tanh, gate times tanh and tanh of gate times differ.
    block.activation = nn.Tanh()
    expected = torch.tanh(block.norm(block.conv(x_BCHW)) * TWO_IMAGES[:, :, None, None])
    torch.testing.assert_close(block(x_BCHW, TWO_IMAGES), expected)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(norm=False),
        dict(bias=True),
        dict(norm=False, bias=True),
        dict(stride=2),
        dict(stride=(1, 2), dilation=(2, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("gates_BC", [TWO_IMAGES, 0 * TWO_IMAGES, None], ids=str)
@pytest.mark.parametrize("in_gates_BC", [IN_GATES, 0 * IN_GATES, None], ids=str)
def test_skipping_equals_masking(x_BCHW, options, gates_BC, in_gates_BC):
    block = layer(**options).eval()
    if in_gates_BC is not None:
        x_BCHW = x_BCHW * in_gates_BC[:, :, None, None]
    found = block(x_BCHW, gates_BC, in_gates_BC=in_gates_BC)
    block.skip_closed = False
    torch.testing.assert_close(found, block(x_BCHW, gates_BC), rtol=1e-4, atol=1e-5)


def test_closed_channels_cost_nothing(x_BCHW):
    """Products per pixel of the 9 x 7 output: open in x open out x 9, by image."""
    block = layer().eval()
    # 4 and 1 of 8 open out; 3 and 1 of 6 open in.
    for in_gates_BC, products in (
        (None, 6 * 4 * 9 + 6 * 1 * 9),
        (IN_GATES, 3 * 4 * 9 + 1 * 1 * 9),
        (0 * IN_GATES, 0),
    ):
        with FlopCounterMode(display=False) as counter:
            block(x_BCHW, TWO_IMAGES, in_gates_BC=in_gates_BC)
        assert counter.get_total_flops() == 2 * 63 * products
    block.train()
    with FlopCounterMode(display=False) as counter:
        block(x_BCHW, TWO_IMAGES)
    assert counter.get_total_flops() == 2 * 63 * 2 * 6 * 8 * 9


def test_gates_and_weights_get_gradients(x_BCHW):
    block = layer()
    open_BC = TWO_IMAGES.clone().requires_grad_()
    block(x_BCHW, open_BC).square().sum().backward()
    # d/dg of relu(g z)^2 is 0 at g = 0 and, behind a batch norm, not where it is open.
    assert torch.equal(open_BC.grad != 0.0, TWO_IMAGES != 0.0)
    # Channels 1, 4 and 6 are closed in both images.
    moved_C = block.conv.weight.grad.flatten(1).abs().sum(dim=1) > 0
    assert moved_C.tolist() == [True, False, True, True, False, True, False, True]


@pytest.mark.parametrize("skip_closed", [True, False])
def test_half_precision_stays_half(x_BCHW, skip_closed):
    conv, x_BCHW = nn.Conv2d(6, 8, 1).bfloat16(), x_BCHW.bfloat16()
    y_BCHW = gated_conv2d(x_BCHW, TWO_IMAGES, conv=conv, skip_closed=skip_closed)
    assert y_BCHW.dtype == torch.bfloat16


GATES = torch.tensor([[0.5, 0.0, 2.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 3.0, 0.0, 0.0]])


class FFN(nn.Module):
    def __init__(self, activation=None):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.activation = activation or nn.ReLU()

    def forward(self, tokens_BND, gates_BH):
        return gated_ffn(
            tokens_BND,
            gates_BH,
            first=self.first,
            activation=self.activation,
            second=self.second,
            skip_closed=not self.training,
        )


@pytest.fixture
def tokens_BND():
    return torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def ffn():
    torch.manual_seed(0)
    return FFN()


def test_only_open_channels_reach_the_output(ffn, tokens_BND):
    """Image 1 has channel 3 alone: 3 * relu(z_3) times column 3, plus the bias."""
    z_N = tokens_BND[1] @ ffn.first.weight[3] + ffn.first.bias[3]
    expected_ND = 3.0 * z_N.clamp(min=0)[:, None] * ffn.second.weight[:, 3]
    torch.testing.assert_close(ffn(tokens_BND, GATES)[1], expected_ND + ffn.second.bias)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.PReLU()], ids=str)
@pytest.mark.parametrize("gates_BH", [GATES, 0 * GATES], ids=["", "closed"])
def test_ffn_skipping_equals_masking(tokens_BND, activation, gates_BH):
    ffn = FFN(activation)
    masked = ffn(tokens_BND, gates_BH)
    torch.testing.assert_close(ffn.eval()(tokens_BND, gates_BH), masked)


def test_closed_ffn_channels_cost_nothing(ffn, tokens_BND):
    # 5 tokens; 3 and 1 open of 6; 4 products in and 4 out for each.
    for training, hidden in ((False, 3 + 1), (True, 6 + 6)):
        ffn.train(training)
        with FlopCounterMode(display=False) as counter:
            ffn(tokens_BND, GATES)
        assert counter.get_total_flops() == 2 * 5 * hidden * (4 + 4)
