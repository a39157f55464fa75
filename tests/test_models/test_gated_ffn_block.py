import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN

from damex.errors import ConfigError
from damex.models.channel_context import ChannelContext
from damex.models.gated_ffn_block import GatedFFNBlock
from damex.moe import ChannelGates


@pytest.fixture
def tokens_BND():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def block_of(**options):
    torch.manual_seed(0)
    ffn = FFN(embed_dims=8, feedforward_channels=16, **options)
    return GatedFFNBlock(ffn, name="encoder.0", context=ChannelContext())


def step(block, gates_BH):
    return block.context.step(
        ChannelGates(torch.zeros(2, 1), layers={"encoder.0": gates_BH})
    )


@pytest.mark.parametrize("training", [True, False], ids=["masked", "skipping"])
@pytest.mark.parametrize(
    "options",
    [{}, dict(act_cfg=dict(type="PReLU")), dict(layer_scale_init_value=0.5)],
    ids=["relu", "prelu", "layer scale"],
)
def test_it_loads_an_ffn_and_equals_it_with_open_gates(tokens_BND, training, options):
    block = block_of(**options).train(training)
    dense = FFN(embed_dims=8, feedforward_channels=16, **options).train(training)
    block.load_state_dict(dense.state_dict())
    other_BND = torch.ones_like(tokens_BND)
    with step(block, torch.ones(2, 16)):
        torch.testing.assert_close(block(tokens_BND), dense(tokens_BND))
        torch.testing.assert_close(
            block(tokens_BND, other_BND), dense(tokens_BND, other_BND)
        )


def test_images_have_their_own_gates(tokens_BND):
    block = block_of()
    gates_BH = torch.zeros(2, 16)
    gates_BH[1] = 1.0
    for training in (True, False):
        block.train(training)
        with step(block, gates_BH):
            found_BND = block(tokens_BND)
        bias_D = block.layers[1].bias
        assert torch.equal(found_BND[0], tokens_BND[0] + bias_D)
        torch.testing.assert_close(
            found_BND[1], tokens_BND[1] + block.layers(tokens_BND)[1]
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_fcs=3), "encoder.0 is an FFN with num_fcs=3"),
        (dict(add_identity=False), "add_identity=False"),
        (dict(act_cfg=dict(type="Sigmoid")), "encoder.0: .*of 0 is not 0"),
    ],
)
def test_what_cannot_be_gated_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        block_of(**options)
