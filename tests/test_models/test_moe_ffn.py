import copy

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN

from damex.models.context import RoutingContext
from damex.models.moe_ffn import MoEFFN
from damex.moe import FFNExperts, LinearRouter, MoELayer, TopKGate


@pytest.fixture
def block():
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, 3),
        gate=TopKGate(k=2, renormalize=True),
        experts=FFNExperts(3, 8, 16),
    )
    return MoEFFN(layer, name="decoder.0", context=RoutingContext())


@pytest.fixture
def tokens_BND():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def test_the_residual_is_added_as_by_mmcv(block, tokens_BND):
    output_BND, _ = block.moe(tokens_BND)
    torch.testing.assert_close(block(tokens_BND), tokens_BND + output_BND)
    other_BND = torch.ones_like(tokens_BND)
    torch.testing.assert_close(block(tokens_BND, other_BND), other_BND + output_BND)


def test_padded_tokens_keep_their_residual(block, tokens_BND):
    mask_BN = torch.ones(2, 5, dtype=torch.bool)
    mask_BN[1, 3:] = False
    with block.context.step(), block.context.part(mask_BN):
        output_BND = block(tokens_BND)
    assert torch.equal(output_BND[1, 3:], tokens_BND[1, 3:])
    assert not torch.equal(output_BND[1, :3], tokens_BND[1, :3])


def test_every_expert_starts_as_the_ffn_of_a_dense_checkpoint(block, tokens_BND):
    """Weights of a token sum to one here, so that the block equals the FFN."""
    dense = FFN(embed_dims=8, feedforward_channels=16)
    router = block.moe.router.weight_ED.detach().clone()
    state = dense.state_dict()
    block.load_state_dict(state)
    assert set(state) == set(dense.state_dict())  # the caller's dict is its own
    assert torch.equal(block.moe.router.weight_ED, router)
    torch.testing.assert_close(block(tokens_BND), dense(tokens_BND))


def test_the_slope_of_a_prelu_is_taken_over_too(tokens_BND):
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, 2),
        gate=TopKGate(k=2, renormalize=True),
        experts=FFNExperts(2, 8, 16, activation="prelu"),
    )
    block = MoEFFN(layer, name="decoder.0", context=RoutingContext())
    dense = FFN(embed_dims=8, feedforward_channels=16, act_cfg=dict(type="PReLU"))
    torch.nn.init.constant_(dense.layers[0][1].weight, -1.5)
    block.load_state_dict(dense.state_dict())
    assert layer.experts.slope_E1.tolist() == [[-1.5], [-1.5]]
    torch.testing.assert_close(block(tokens_BND), dense(tokens_BND))


def test_a_copy_upcycles_itself_and_not_the_original(block, tokens_BND):
    dense = FFN(embed_dims=8, feedforward_channels=16)
    before = block(tokens_BND)
    other = copy.deepcopy(block)
    other.load_state_dict(dense.state_dict())
    torch.testing.assert_close(other(tokens_BND), dense(tokens_BND))
    assert torch.equal(block(tokens_BND), before)


def test_an_ffn_of_another_width_is_reported_by_the_loader(block):
    dense = FFN(embed_dims=8, feedforward_channels=32)
    with pytest.raises(RuntimeError, match="Missing key"):
        block.load_state_dict(dense.state_dict())
