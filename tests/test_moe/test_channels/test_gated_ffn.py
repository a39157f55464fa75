import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from damex.moe import GatedFFN

GATES = torch.tensor([[0.5, 0.0, 2.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 3.0, 0.0, 0.0]])


@pytest.fixture
def tokens_BND():
    return torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def ffn():
    torch.manual_seed(0)
    return GatedFFN(4, 6)


@pytest.mark.parametrize("training", [True, False], ids=["masked", "skipping"])
def test_open_gates_are_the_plain_ffn(ffn, tokens_BND, training):
    ffn.train(training)
    plain = nn.Sequential(ffn.first, nn.ReLU(), ffn.second)
    torch.testing.assert_close(ffn(tokens_BND, torch.ones(2, 6)), plain(tokens_BND))


@pytest.mark.parametrize("training", [True, False], ids=["masked", "skipping"])
def test_an_image_without_open_channels_gets_the_bias(ffn, tokens_BND, training):
    out_BND = ffn.train(training)(tokens_BND, torch.zeros(2, 6))
    assert torch.equal(out_BND, ffn.second.bias.expand(2, 5, 4))


def test_only_open_channels_reach_the_output(ffn, tokens_BND):
    """Image 1 has channel 3 alone: 3 * relu(z_3) times column 3, plus the bias."""
    z_N = tokens_BND[1] @ ffn.first.weight[3] + ffn.first.bias[3]
    expected_ND = 3.0 * z_N.clamp(min=0)[:, None] * ffn.second.weight[:, 3]
    torch.testing.assert_close(ffn(tokens_BND, GATES)[1], expected_ND + ffn.second.bias)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.PReLU()], ids=str)
def test_skipping_equals_masking(tokens_BND, activation):
    ffn = GatedFFN(4, 6, activation=activation, dropout=0.5).eval()
    found = ffn(tokens_BND, GATES)
    ffn.skip_closed = False
    torch.testing.assert_close(found, ffn(tokens_BND, GATES))


def test_closed_channels_cost_nothing(ffn, tokens_BND):
    # 5 tokens; 3 and 1 open of 6; 4 products in and 4 out for each.
    for training, hidden in ((False, 3 + 1), (True, 6 + 6)):
        ffn.train(training)
        with FlopCounterMode(display=False) as counter:
            ffn(tokens_BND, GATES)
        assert counter.get_total_flops() == 2 * 5 * hidden * (4 + 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(embed_dims=0, hidden_dims=4), "must be positive, got 0 and 4"),
        (
            dict(embed_dims=2, hidden_dims=4, activation=nn.Sigmoid()),
            "of 0 is not 0",
        ),
    ],
)
def test_what_cannot_be_gated_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GatedFFN(**arguments)
