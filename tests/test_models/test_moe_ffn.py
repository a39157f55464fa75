import pytest
import torch

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
