"""Blocks with the norm before the experts, and with a drop path."""

import copy

import pytest
import torch
from torch import nn

from damex.errors import ConfigError
from damex.models.block_options import BlockOptions, read_block_options
from damex.models.context import RoutingContext
from damex.models.moe_ffn import MoEFFN
from damex.moe import FFNExperts, LinearRouter, MoELayer, TopKGate

PRE = dict(
    layers=dict(encoder=[1], decoder=[0, 2]),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
    block=dict(norm="pre"),
)


def make_block(**options):
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, 3), gate=TopKGate(1), experts=FFNExperts(3, 8, 16)
    )
    return MoEFFN(layer, name="decoder.0", context=RoutingContext(), **options)


def test_a_norm_stands_before_the_experts_and_not_on_the_residual():
    norm = nn.LayerNorm(8)
    nn.init.constant_(norm.weight, 2.0)
    block, tokens = make_block(norm=norm), torch.randn(2, 5, 8)
    out, _ = block.moe(norm(tokens))
    torch.testing.assert_close(block(tokens), tokens + out)


def test_the_closing_norm_moves_into_the_block(build):
    detector, dense = build(moe=PRE), build(moe=None)
    for part, numbers in (("encoder", [1]), ("decoder", [0, 2])):
        layers = getattr(detector, part).layers
        for number, layer in enumerate(layers):
            moved = number in numbers
            assert isinstance(layer.norms[-1], nn.Identity) == moved
            if moved:
                assert isinstance(layer.ffn.norm, nn.LayerNorm)
    count = [
        sum(p.numel() for n, p in d.named_parameters() if "norm" in n)
        for d in (detector, dense)
    ]
    assert count[0] == count[1]


def test_the_layer_computes_x_plus_experts_of_the_norm_and_ends_there(build):
    layer = build(moe=PRE).encoder.layers[1].eval()
    seen = []
    layer.ffn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    layer.self_attn = _Passes()
    query = torch.randn(2, 6, 64)
    out = layer(query=query, query_pos=None, key_padding_mask=None)
    routed, _ = layer.ffn.moe(layer.ffn.norm(seen[0]))
    torch.testing.assert_close(out, seen[0] + routed)


class _Passes(nn.Module):
    def forward(self, query, **kwargs):
        return query


def test_a_dense_checkpoint_gives_its_closing_norm_to_the_block(build):
    dense, detector = build(moe=None), build(moe=PRE)
    with torch.no_grad():
        dense.decoder.layers[2].norms[2].weight.fill_(3.0)
        dense.decoder.layers[1].norms[2].weight.fill_(4.0)
    state = dense.state_dict()
    detector.load_state_dict(state)  # strict: nothing is missing or too much
    assert (detector.decoder.layers[2].ffn.norm.weight == 3.0).all()
    assert (detector.decoder.layers[1].norms[2].weight == 4.0).all()
    assert set(state) == set(dense.state_dict())


def test_own_checkpoints_and_copies_go_round(build):
    detector = build(moe=PRE)
    with torch.no_grad():
        detector.decoder.layers[0].ffn.norm.weight.fill_(5.0)
    other = build(moe=PRE)
    other.load_state_dict(detector.state_dict())
    assert (other.decoder.layers[0].ffn.norm.weight == 5.0).all()
    clone = copy.deepcopy(other)
    clone.load_state_dict(build(moe=None).state_dict())
    assert (clone.decoder.layers[0].ffn.norm.weight == 1.0).all()
    assert (other.decoder.layers[0].ffn.norm.weight == 5.0).all()


def test_drop_path_drops_tokens_in_training_and_scales_the_rest():
    block, tokens = make_block(drop_path=0.2), torch.randn(4, 500, 8)
    with torch.no_grad():
        out, _ = block.moe(tokens)
        change = block(tokens) - tokens
    dropped = (change == 0).all(dim=-1)
    # 2000 tokens: 400 expected; five standard deviations of a binomial are 90
    assert abs(dropped.sum().item() - 400) < 90
    # each token has its own chance: no image is dropped or kept as a whole
    assert ((dropped.sum(1) > 0) & (dropped.sum(1) < 500)).all()
    torch.testing.assert_close(
        change[~dropped], (out / 0.8)[~dropped], rtol=1e-4, atol=1e-5
    )
    block.eval()
    with torch.no_grad():
        torch.testing.assert_close(block(tokens) - tokens, block.moe(tokens)[0])


def test_padding_does_not_shift_what_is_dropped():
    block, tokens = make_block(drop_path=0.5), torch.randn(1, 6, 8)
    padded = torch.cat([tokens, torch.randn(1, 4, 8)], dim=1)
    mask = torch.arange(10).unsqueeze(0) < 6
    outs = []
    for given, real in ((tokens, None), (padded, mask)):
        torch.manual_seed(4)
        with block.context.step(), block.context.part(real):
            outs.append(block(given))
    torch.testing.assert_close(outs[1][:, :6], outs[0])
    assert torch.equal(outs[1][:, 6:], padded[:, 6:])


def test_defaults_are_those_of_a_detr():
    assert read_block_options(None) == BlockOptions(norm="post", drop_path=0.0)
    assert read_block_options(dict(norm="pre")).drop_path == 0.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(norm="both"), r"moe.block.norm must be one of .*'pre'.*, got 'both'"),
        (dict(drop_path=1.0), r"moe.block.drop_path must lie in \[0, 1\), got 1.0"),
        (dict(drop_path="0.2"), r"moe.block.drop_path must lie in .*, got '0.2'"),
        (dict(drop_path=True), r"moe.block.drop_path must lie in .*, got True"),
        (dict(droppath=0.1), "unknown key 'droppath'; did you mean 'drop_path'"),
        ("pre", r"moe.block must be a dict of .*'norm'.*, got 'pre'"),
    ],
)
def test_errors_are_one_line_with_field_value_and_choice(config, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_block_options(config)
    assert "\n" not in str(caught.value)
